"""Grammars are compiled once, beside the engine's thread."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from corun.runtime.engine.tokenizer import read_tokenizer
from corun.runtime.errors import OverloadedError, RequestError
from corun.runtime.grammar import compiled
from corun.runtime.grammar.compiled import Grammars
from corun.runtime.grammar.tokenizer import TokenTree
from corun.runtime.sampling import StructuredOutput
from support.byte_grammars import regex
from support.tokenizers import save_sample_tokenizer

WAIT_S = 20.0


class Compiling:
    """Grammars of a small tokenizer, and an event for each that is done."""

    def __init__(self, directory: Path) -> None:
        save_sample_tokenizer("byte level", directory)
        backend = read_tokenizer(str(directory), 400).backend
        self.told = threading.Semaphore(0)
        self.grammars = Grammars(TokenTree(backend, num_ids=400, eos_token_ids=(1,)), self.told.release)

    def wait_for(self, structured: StructuredOutput) -> None:
        while self.grammars.must_wait(structured):
            assert self.told.acquire(timeout=WAIT_S)


@pytest.fixture
def compiling(tmp_path: Path) -> Iterator[Compiling]:
    made = Compiling(tmp_path)
    yield made
    made.grammars.close()


def test_requests_wait_until_it_is_compiled_and_not_again(compiling: Compiling) -> None:
    grammars = compiling.grammars
    assert grammars.must_wait(regex("ab"))
    grammars.check(regex("ab"))  # not compiled, so no error
    grammars.start()
    assert compiling.told.acquire(timeout=WAIT_S)  # which comes after it is done
    assert not grammars.must_wait(regex("ab"))
    grammars.check(regex("ab"))
    first, second = grammars.matcher(regex("ab")), grammars.matcher(regex("ab"))
    assert first.mask((), ()).any()
    assert first is not second
    assert not compiling.told.acquire(blocking=False)


def test_what_cannot_be_served_is_an_error_for_each_request(compiling: Compiling) -> None:
    compiling.grammars.start()
    compiling.wait_for(regex("a("))
    for _ in range(2):
        with pytest.raises(RequestError, match="structured_output cannot be served"):
            compiling.grammars.check(regex("a("))
        with pytest.raises(RequestError, match="structured_output cannot be served"):
            compiling.grammars.matcher(regex("a("))
    compiling.wait_for(regex("a"))
    compiling.grammars.check(regex("a"))


def test_the_last_ones_are_kept(compiling: Compiling, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "_MAX_KEPT", 2)
    compiling.grammars.start()
    for text in ("a", "b", "a", "c"):
        compiling.wait_for(regex(text))
    assert not compiling.grammars.must_wait(regex("a"))
    assert compiling.grammars.must_wait(regex("b"))


def test_a_tree_that_does_not_come_is_an_overload_that_may_pass(
    compiling: Compiling, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "_MAX_WAIT_S", 0.01)
    compiling.wait_for(regex("a"))
    with pytest.raises(OverloadedError, match="retry later"):
        compiling.grammars.check(regex("a"))
    monkeypatch.setattr(compiled, "_MAX_WAIT_S", WAIT_S)
    compiling.grammars.start()
    compiling.wait_for(regex("a"))
    compiling.grammars.check(regex("a"))

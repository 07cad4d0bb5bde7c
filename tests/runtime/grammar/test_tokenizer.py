"""The tree of a model's tokens, made by a thread; bits say which tokens may come next."""

from pathlib import Path

import numpy as np
import pytest
from corun.runtime.engine.tokenizer import ModelTokenizer, read_tokenizer
from corun.runtime.errors import OverloadedError, RequestError
from corun.runtime.grammar.compile import start_forcing, start_matcher
from corun.runtime.grammar.matcher import Matcher
from corun.runtime.grammar.tokenizer import TokenTree, trial_tokenizer
from corun.runtime.sampling import StructuredOutput
from llguidance import LLMatcher, LLTokenizer
from support.tokenizers import save_sample_tokenizer

NUM_IDS = 400  # more than the tokenizer has: the embedding is padded


def sample(kind: str, directory: Path) -> ModelTokenizer:
    save_sample_tokenizer(kind, directory)
    return read_tokenizer(str(directory), NUM_IDS)


def tree_of(tokenizer: ModelTokenizer, *ends: int) -> TokenTree:
    return TokenTree(tokenizer.backend, num_ids=NUM_IDS, eos_token_ids=ends)


def made(tree: TokenTree) -> LLTokenizer:
    tree.start()
    return tree.get(20.0)


def allowed(tree: LLTokenizer, lark: str, *tokens: int) -> set[int]:
    """Return the ids that may follow ``tokens``."""
    matcher = LLMatcher(tree, LLMatcher.grammar_from_lark(lark), log_level=0)
    assert matcher.consume_tokens(list(tokens)), matcher.get_error()
    words = np.frombuffer(matcher.compute_bitmask(), np.uint8)
    return set(np.flatnonzero(np.unpackbits(words, bitorder="little")).tolist())


@pytest.mark.parametrize("kind", ["byte level", "sentencepiece"])
def test_bits_are_the_ids_of_the_model(kind: str, tmp_path: Path) -> None:
    tokenizer = sample(kind, tmp_path)
    ids, end = tokenizer.tokens.ids, tokenizer.tokens.eos_token_id
    assert end is not None
    tree = made(tree_of(tokenizer, end))
    assert tree.vocab_size == NUM_IDS
    lark = 'start: "Hello" | "world"'
    assert {ids["Hello"], ids["H"], ids["w"]} <= allowed(tree, lark)
    assert ids["hello"] not in allowed(tree, lark)
    assert allowed(tree, lark, ids["Hello"]) == {end}
    assert allowed(tree, 'start: <tool> "H"') == {ids["<tool>"]}
    assert allowed(tree, 'start: <[399]> "H"') == {399}  # an id that only an adapter names
    free = allowed(tree, r"start: /(.|\n)*/")
    assert ids["Hello"] in free and ids["<tool>"] not in free and 399 not in free


@pytest.mark.parametrize("kind", ["byte level", "sentencepiece"])
def test_forced_text_is_split_as_the_model_splits_text(kind: str, tmp_path: Path) -> None:
    tokenizer = sample(kind, tmp_path)
    ids, end = tokenizer.tokens.ids, tokenizer.tokens.eos_token_id
    assert end is not None
    tree = made(tree_of(tokenizer, end))

    def forced(pattern: str) -> list[int]:
        structured = StructuredOutput("regex", pattern)
        forcing = Matcher(start_forcing(structured, tree), tree)
        matcher = Matcher(start_matcher(structured, tree), tree, forcing)
        return matcher.forced(np.zeros(0, dtype=np.int64))

    assert forced("Hello") == [ids["Hello"]]
    assert forced("Hell[oa]") == []  # "Hello" may follow, which is one token
    assert ids["<tool>"] not in forced("H<tool>")


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("regex", "ab<tool>b"),
        ("json_schema", '{"enum": ["<tool> <|end|>"]}'),
        ("choice", '["<tool>", "<|begin|>x"]'),
        ("grammar", '%llguidance {"no_forcing": false}\nstart: "<tool>" "a"'),
        ("grammar", 'root ::= "<tool>a"'),
    ],
)
def test_the_text_of_an_added_token_is_written_in_others(kind: str, text: str, tmp_path: Path) -> None:
    tokenizer = sample("byte level", tmp_path)
    end = tokenizer.tokens.eos_token_id
    assert end is not None
    tree = made(tree_of(tokenizer, end))
    matcher = start_matcher(StructuredOutput(kind, text), tree)
    tokens = list[int]()
    while not matcher.is_accepting():
        words = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        token = int(np.flatnonzero(np.unpackbits(words, bitorder="little"))[-1])
        assert matcher.consume_token(token), matcher.get_error()
        tokens.append(token)
    assert tokenizer.tokens.ids["<tool>"] not in tokens
    assert "<" in tree.decode_str(tokens)


@pytest.mark.parametrize(
    ("backend", "ends", "message"),
    [
        (None, [1], "structured output cannot be served .*: it is implemented in Python"),
        ('{"model": 1}', [1], "structured output cannot be served with the model's tokenizer"),
    ],
)
def test_tokenizers_without_a_tree(backend: str | None, ends: list[int], message: str) -> None:
    tree = TokenTree(backend, num_ids=9, eos_token_ids=ends)
    tree.start()
    for _ in range(2):
        with pytest.raises(RequestError, match=message):
            tree.get(20.0)


def test_a_model_without_end_token_has_no_tree(tmp_path: Path) -> None:
    tokenizer = sample("byte level", tmp_path)
    tree = tree_of(tokenizer)
    with pytest.raises(RequestError, match="eos_token list must not be empty"):
        made(tree)


def test_a_tree_that_is_not_ready_is_awaited_only_so_long() -> None:
    tree = TokenTree(None, num_ids=9, eos_token_ids=[1])
    with pytest.raises(OverloadedError, match=r"not ready .* within 0.01 s; retry later"):
        tree.get(0.01)


def test_the_tree_of_trials_has_room_for_special_tokens_anywhere() -> None:
    tree = trial_tokenizer(10, {0: "<a>", 5: "<b>"})
    assert allowed(tree, "start: <a>") == {0} and allowed(tree, "start: <b>") == {5}
    (first,) = allowed(tree, 'start: "x"')
    assert tree.decode_bytes([first]) == b"x"

"""Rows with grammars: each draws what its own grammar allows after its own output, always."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from corun.gpu.execution import row_grammar
from corun.gpu.execution.request_table import RequestState
from corun.gpu.execution.sampler import Sampler
from corun.runtime.errors import RequestError
from corun.runtime.grammar.matcher import Matcher
from corun.runtime.plan import BASE_ADAPTER, NewRequest, Outcome, RequestId, RetryCause, StepResult
from corun.runtime.sampling import SamplingParams, StructuredOutput
from support.architectures import save_model
from support.byte_grammars import byte_matcher, regex
from support.executor_device import ExecutorDevice, blocks, new, rows

PROMPT = (5, 6, 7, 8)
END = 2
WAIT_S = 20.0


class Made:
    """The matchers of a device; a test can let them wait or fail."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.may_make = threading.Event()
        self.may_make.set()

    def __call__(self, structured: StructuredOutput) -> Matcher:
        assert self.may_make.wait(WAIT_S)
        if self.error is not None and structured.text == "A":
            raise self.error
        return byte_matcher(structured)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model("llama3-rope", tmp_path_factory.mktemp("model"))


@pytest.fixture
def made() -> Made:
    return Made()


@pytest.fixture
def device(directory: Path, made: Made) -> Iterator[ExecutorDevice]:
    device = ExecutorDevice(directory, made)
    yield device
    made.may_make.set()
    device.executor.close()
    device.loaded.close()


def constrained(request_id: int, pattern: str, **params: Any) -> NewRequest:
    """Each of its tokens is drawn, unless ``params`` has it otherwise."""
    fields = {"max_tokens": 20, "structured_forced_tokens": False} | params
    sampling = SamplingParams(temperature=0, structured_output=regex(pattern), **fields)
    return NewRequest(RequestId(request_id), PROMPT, sampling, BASE_ADAPTER)


def drawn(result: StepResult) -> dict[int, str]:
    """The tokens of a step as text, by request."""
    assert all(row.outcome is Outcome.TOKENS for row in result.rows), result.rows
    return {row.request_id: chr(row.token_ids[0]) for row in result.rows}


def begin(device: ExecutorDevice, *patterns: str, **params: Any) -> StepResult:
    """The first tokens of requests 1, 2, ... with these patterns; each has two blocks."""
    ids = range(1, 1 + len(patterns))
    results: list[StepResult] = device.run(
        rows(*((one, 0, 4, True) for one in ids)),
        new_requests=tuple(
            constrained(one, pattern, **params) for one, pattern in zip(ids, patterns, strict=True)
        ),
        block_updates=tuple(blocks(one, 2 * one, 2 * one + 1) for one in ids),
    )
    return results[0]


def step(device: ExecutorDevice, position: int, *ids: int) -> StepResult:
    result: StepResult = device.run(rows(*((one, position, 1, True) for one in ids)))[0]
    return result


def test_each_row_follows_its_own_grammar_from_token_to_token(device: ExecutorDevice) -> None:
    """A mask of another row, or of the step before, allows none of these tokens."""
    assert drawn(begin(device, "ABCD", "0123", "XYZW")) == {1: "A", 2: "0", 3: "X"}
    assert drawn(step(device, 4, 3, 1, 2)) == {1: "B", 2: "1", 3: "Y"}  # in another order
    assert drawn(step(device, 5, 2)) == {2: "2"}  # the others do not sample
    assert drawn(step(device, 5, 1, 3)) == {1: "C", 3: "Z"}
    last = step(device, 6, 1, 2, 3)
    assert drawn(last) == {1: "D", 2: "3", 3: "W"}
    assert all(row.is_last for row in last.rows)


def test_free_rows_draw_what_they_draw_alone(device: ExecutorDevice) -> None:
    (alone,) = device.run(
        rows((9, 0, 4, True)), new_requests=(new(9, PROMPT),), block_updates=(blocks(9, 20, 21),)
    )
    (result,) = device.run(
        rows((1, 0, 4, True), (8, 0, 4, True), (2, 0, 4, True)),
        new_requests=(constrained(1, "A+"), new(8, PROMPT), constrained(2, "B+")),
        block_updates=(blocks(1, 2, 3), blocks(8, 22, 23), blocks(2, 4, 5)),
    )
    assert result.rows[1].token_ids == alone.rows[0].token_ids
    assert not result.rows[1].is_last


def test_preempted_rows_lose_no_token_and_consume_none_twice(device: ExecutorDevice) -> None:
    begin(device, "ABCDEF", "(00|11)(22|33)(44|55)")
    first = drawn(step(device, 4, 1, 2))
    assert first[1] == "B"
    # Computed again in other blocks, in chunks, with the tokens drawn before; then the next.
    device.run(rows((1, 0, 3, False)), block_updates=(blocks(1, 20, 21),))
    (again,) = device.run(rows((1, 3, 3, True)))
    assert drawn(again) == {1: "C"}
    (again,) = device.run(rows((2, 0, 6, True)), block_updates=(blocks(2, 22, 23),))
    assert drawn(again)[2] in "23"
    assert drawn(step(device, 6, 1)) == {1: "D"}


def test_rows_computed_again_from_an_earlier_token_follow_what_they_draw_then(device: ExecutorDevice) -> None:
    """As after a step whose result does not count."""
    begin(device, "ABCD")
    assert drawn(step(device, 4, 1)) == {1: "B"}
    assert drawn(step(device, 5, 1)) == {1: "C"}
    assert drawn(step(device, 4, 1)) == {1: "B"}
    assert drawn(step(device, 5, 1)) == {1: "C"}
    assert drawn(step(device, 6, 1)) == {1: "D"}


def test_a_pass_that_fails_changes_nothing(device: ExecutorDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    begin(device, "ABCD")
    forward = device.runner.forward
    monkeypatch.setattr(device.runner, "forward", lambda *_: 1 // 0)
    assert step(device, 4, 1).rows[0].cause is RetryCause.FORWARD
    monkeypatch.setattr(device.runner, "forward", lambda *_: torch.zeros(1, 96, dtype=torch.half))
    assert step(device, 4, 1).rows[0].cause is RetryCause.FORWARD  # in the sampler
    monkeypatch.setattr(device.runner, "forward", forward)
    assert drawn(step(device, 4, 1)) == {1: "B"}
    assert drawn(step(device, 5, 1)) == {1: "C"}


FORCED = {"structured_forced_tokens": True}


def texts(result: StepResult) -> dict[int, str]:
    """All tokens of a step as text, by request."""
    assert all(row.outcome is Outcome.TOKENS for row in result.rows), result.rows
    return {row.request_id: "".join(map(chr, row.token_ids)) for row in result.rows}


def test_text_without_a_choice_comes_with_the_token_before_it(device: ExecutorDevice) -> None:
    first = begin(device, "ABC(00|11)D", "A{40}", "[XY]Z", "AB*", **FORCED)
    found = texts(first)
    assert found.pop(3) in ("XZ", "YZ")
    assert found == {1: "ABC", 2: "A" * 20, 4: "A"}
    assert [row.is_last for row in first.rows] == [False, False, True, False]
    (second,) = device.run(rows((1, 4, 3, True)))
    assert texts(second)[1] in ("00D", "11D") and second.rows[0].is_last


def test_forced_tokens_leave_what_a_pass_of_each_leaves(device: ExecutorDevice) -> None:
    """The tokens after them are those after drawn ones, also computed again from before them."""
    pattern = "AB[0-9]CDEF[G-P]{2}"
    begin(device, pattern)
    expected = "A" + "".join(drawn(step(device, 4 + one, 1))[1] for one in range(8))
    for request_id in (11, 12):
        blocks_of = blocks(request_id, 2 * request_id, 2 * request_id + 1)
        (first,) = device.run(
            rows((request_id, 0, 4, True)),
            new_requests=(constrained(request_id, pattern, **FORCED),),
            block_updates=(blocks_of,),
        )
        text = texts(first)[request_id]
        assert text == "AB"
        for num_tokens in (2, 5, 1):
            start = 4 + len(text) - num_tokens
            (result,) = device.run(rows((request_id, start, num_tokens, True)))
            if request_id == 12:  # as if the first result did not count
                (result,) = device.run(rows((request_id, start, num_tokens, True)))
            text += texts(result)[request_id]
        assert text == expected and result.rows[0].is_last


@pytest.mark.parametrize(
    "params",
    [
        {"logprobs": 0},
        {"bad_words_ids": ((66, 67),)},
        {"logit_bias": {66: 1.0}},
        {"allowed_token_ids": tuple(range(96))},
    ],
)
def test_each_token_is_drawn_where_it_may_be_forbidden_or_is_reported(
    device: ExecutorDevice, params: dict[str, Any]
) -> None:
    assert texts(begin(device, "ABC", **FORCED, **params)) == {1: "A"}
    assert texts(step(device, 4, 1)) == {1: "B"}


@pytest.mark.parametrize("params", [{}, {"ignore_eos": True}, {"min_tokens": 20}])
def test_an_answer_ends_with_its_grammar(device: ExecutorDevice, params: dict[str, Any]) -> None:
    (first,) = begin(device, "AB", **params).rows
    assert not first.is_last
    (last,) = step(device, 4, 1).rows
    assert (last.token_ids, last.is_last) == ((ord("B"),), True)


def test_an_end_token_ends_an_answer_that_could_continue(device: ExecutorDevice) -> None:
    wanted = {"logit_bias": {END: 100.0}}
    assert drawn(begin(device, "A*", "AA*", **wanted)) == {1: chr(END), 2: "A"}
    (last,) = step(device, 4, 2).rows
    assert (last.token_ids, last.is_last) == ((END,), True)


@pytest.mark.parametrize("params", [{}, {"ignore_eos": True}])
def test_stop_tokens_end_an_answer_where_it_may_end(device: ExecutorDevice, params: dict[str, Any]) -> None:
    """An adapter's end tokens are among them. Elsewhere they cut no answer."""
    wanted = {"logit_bias": {END + 1: 100.0}, "stop_token_ids": (END + 1,)}
    begin(device, "AB*", "ABB*", **wanted, **params)
    first, second = step(device, 4, 1, 2).rows
    assert (first.token_ids, first.is_last) == ((END + 1,), True)
    assert (second.token_ids, second.is_last) == ((ord("B"),), False)


def test_draws_that_do_not_count_consume_nothing() -> None:
    """As of rows whose deltas were void."""
    sampler = Sampler((END,), byte_matcher)
    state = RequestState(constrained(1, "ABC"), 0, 64)
    sampler.begin([state])
    for expected in "ABC":
        for _ in range(2):
            (row,) = sampler.sample(torch.zeros(1, 100), [state])
            assert chr(row.token_id) == expected
        (row,) = sampler.take([(state, row)])
    assert row.is_last
    sampler.close()


@pytest.mark.parametrize("params", [{"ignore_eos": True}, {"min_tokens": 2}])
def test_end_tokens_are_held_back_while_the_grammar_allows_others(
    device: ExecutorDevice, params: dict[str, Any]
) -> None:
    begin(device, "A{0,3}", logit_bias={END: 100.0}, **params)
    (second,) = step(device, 4, 1).rows
    assert (second.token_ids, second.is_last) == ((ord("A"),), False)
    (third,) = step(device, 5, 1).rows
    wanted = ord("A") if params.get("ignore_eos") else END
    assert (third.token_ids, third.is_last) == ((wanted,), True)


def test_other_rules_hold_beside_a_grammar(device: ExecutorDevice) -> None:
    rules = {"bad_words_ids": ((65,),), "allowed_token_ids": (65, 66, 67), "logit_bias": {67: 50.0}}
    assert drawn(begin(device, "[A-Z]+", **rules)) == {1: "C"}
    (result,) = device.run(
        rows((5, 0, 4, True)),
        new_requests=(constrained(5, "X", allowed_token_ids=(65,)),),
        block_updates=(blocks(5, 24, 25),),
    )
    assert result.rows[0].error_kind == "RequestError" and "grammar" in (result.rows[0].error or "")


def test_log_probabilities_are_those_before_the_mask(device: ExecutorDevice) -> None:
    (free,) = device.run(
        rows((9, 0, 4, True)),
        new_requests=(
            NewRequest(
                RequestId(9),
                PROMPT,
                SamplingParams(temperature=0, logprobs=3, prompt_logprobs=1),
                BASE_ADAPTER,
            ),
        ),
        block_updates=(blocks(9, 20, 21),),
    )
    (bound,) = begin(device, "A", logprobs=3, prompt_logprobs=1).rows
    (other,) = free.rows
    assert bound.logprobs is not None and other.logprobs is not None
    assert bound.logprobs[0].top_token_ids == other.logprobs[0].top_token_ids
    assert bound.logprobs[0].top_logprobs == pytest.approx(other.logprobs[0].top_logprobs)
    assert bound.logprobs[0].logprob < other.logprobs[0].logprob
    assert bound.prompt_logprobs == other.prompt_logprobs is not None


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (RequestError("no such grammar"), "RequestError"),
        (ZeroDivisionError("no such grammar"), "StepFailedError"),
    ],
)
def test_a_grammar_that_fails_ends_its_request_alone(
    device: ExecutorDevice, made: Made, error: Exception, kind: str
) -> None:
    made.error = error
    failed, other = begin(device, "A", "BC").rows
    assert (failed.outcome, failed.error_kind) == (Outcome.FAILED, kind)
    assert "no such grammar" in (failed.error or "")
    assert other.token_ids == (ord("B"),)
    assert drawn(step(device, 4, 2)) == {2: "C"}


def test_a_mask_that_does_not_come_fails_its_row(
    device: ExecutorDevice, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_grammar, "_MASK_TIMEOUT_S", 0.05)
    made.may_make.clear()
    (late,) = begin(device, "A").rows
    assert (late.outcome, late.error_kind) == (Outcome.FAILED, "StepFailedError")
    assert "0.05 s" in (late.error or "")


def test_a_thread_fills_the_masks(device: ExecutorDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    fill, threads = row_grammar.RowGrammar.fill, []

    def recorded(self: Any, output: Any) -> None:
        threads.append(threading.current_thread().name)
        fill(self, output)

    monkeypatch.setattr(row_grammar.RowGrammar, "fill", recorded)
    begin(device, "ABCD", "AB")
    step(device, 4, 1, 2)
    step(device, 5, 1)
    # Before the first token, and after each that does not end its answer.
    assert threads[:5] == ["corun-grammars"] * 5

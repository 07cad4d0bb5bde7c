"""Limits name what was given, what it met and which option moves it."""

from typing import Any

import pytest
from corun.runtime.errors import OverloadedError, RequestError, TooManySequencesError
from corun.runtime.limits import (
    HttpLimits,
    check_body,
    check_num_open,
    check_num_output_tokens,
    check_num_sequences,
    check_num_stops,
    check_predicted_output,
    check_prompt_length,
    check_queue,
)

ROOM = {"max_num_seqs": 3, "max_num_waiting": 2}


def test_prompts() -> None:
    check_prompt_length(1, 10)
    check_prompt_length(9, 10)
    for num_tokens in (0, 10, 11):
        with pytest.raises(RequestError) as caught:
            check_prompt_length(num_tokens, 10)
        assert caught.value.param == "prompt"


def test_predictions_of_clients() -> None:
    for num_tokens in (None, 1, 2**31 - 1):
        check_predicted_output(num_tokens)
    for num_tokens in (0, -1, 2**31):
        with pytest.raises(RequestError, match=f"is {num_tokens}, must be in") as caught:
            check_predicted_output(num_tokens)
        assert caught.value.param == "predicted_output_tokens"


def test_sequences_of_one_caller() -> None:
    check_num_sequences(5, 1, **ROOM)
    check_num_sequences(1, 5, **ROOM)
    for num_prompts, num_choices, param in ((6, 1, "prompt"), (1, 6, "n"), (2, 3, "n")):
        with pytest.raises(TooManySequencesError, match=r"6 sequences, .* at most 5") as caught:
            check_num_sequences(num_prompts, num_choices, **ROOM)
        assert (caught.value.param, caught.value.status) == (param, 400)


def test_sequences_beside_those_that_are_open() -> None:
    check_num_open(3, 2, **ROOM)
    with pytest.raises(OverloadedError, match="4 requests are open and 2 more would exceed 5"):
        check_num_open(4, 2, **ROOM)


def test_the_queue() -> None:
    check_queue(1, 2)
    check_queue(10**6, None)
    with pytest.raises(OverloadedError, match=r"2 requests are waiting.*\(--max-num-waiting\)"):
        check_queue(2, 2)


def test_stop_strings() -> None:
    check_num_stops(3, 3)
    with pytest.raises(
        RequestError, match=r"4 stop .*at most 3 .*\(--max-stop-strings\)"
    ) as caught:
        check_num_stops(4, 3)
    assert caught.value.param == "stop"


def nested(depth: int, *, kind: type) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [0, value] if kind is list else {"a": 0, "b": value}
    return value


@pytest.mark.parametrize("kind", [list, dict])
def test_the_depth_of_bodies(kind: type) -> None:
    limits = HttpLimits(max_json_depth=5)
    check_body({"prompt": nested(4, kind=kind), "tokens": [1] * 1000}, limits)
    for depth in (5, 100_000):
        with pytest.raises(RequestError, match=r"more than 5 .*deep \(--max-json-depth\)"):
            check_body({"prompt": nested(depth, kind=kind)}, limits)


def test_the_length_of_conversations() -> None:
    limits = HttpLimits(max_messages=2)
    allowed: list[Any] = [[{}] * 2, "text of any length", None]
    for messages in allowed:
        check_body({"messages": messages}, limits)
    with pytest.raises(RequestError, match=r"has 3 messages, at most 2 .*--max-messages") as caught:
        check_body({"messages": [{}] * 3}, limits)
    assert caught.value.param == "messages"


def test_tokens_of_one_request() -> None:
    check_num_output_tokens(2, 3, 4, max_request_tokens=24)
    with pytest.raises(
        RequestError, match=r"24 tokens, at most 23 .*--max-request-tokens"
    ) as caught:
        check_num_output_tokens(2, 3, 4, max_request_tokens=23)
    assert caught.value.param == "max_tokens"

"""Limits name what was given, what it met and which option moves it."""

import pytest
from corun.runtime.errors import OverloadedError, RequestError, TooManySequencesError
from corun.runtime.limits import (
    check_bad_words,
    check_num_open,
    check_num_output_tokens,
    check_num_sequences,
    check_predicted_output,
    check_prompt_length,
    check_queue,
    check_stops,
    check_waiting_chars,
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
    limits = {"max_stop_strings": 3, "max_stop_bytes": 6}
    check_stops(["aa"] * 3, **limits)
    check_stops([1, None, "€€"], **limits)  # types are checked elsewhere
    for stops, words in (
        (["a"] * 4, r"4 stop .*at most 3 .*\(--max-stop-strings\)"),
        (["aa", "aa", "a€"], r"8 bytes together, at most 6 .*\(--max-stop-bytes\)"),
        (["\ud800" * 7], "7 bytes"),
    ):
        with pytest.raises(RequestError, match=words) as caught:
            check_stops(stops, **limits)
        assert caught.value.param == "stop"


def test_bad_words() -> None:
    check_bad_words(["aaa"] * 2, max_bad_words_bytes=6)
    for bad_words, words in (
        (["a"] * 129, "129 bad words were given, at most 128"),
        (["aaaa", "aaa"], r"7 bytes together, at most 6 .*\(--max-bad-words-bytes\)"),
    ):
        with pytest.raises(RequestError, match=words) as caught:
            check_bad_words(bad_words, max_bad_words_bytes=6)
        assert caught.value.param == "bad_words"


def test_texts_that_wait_to_be_tokenized() -> None:
    limits = {"max_waiting_chars": 10, "retry_after_s": 3}
    check_waiting_chars(0, 1000, **limits)
    check_waiting_chars(4, 6, **limits)
    with pytest.raises(
        OverloadedError, match=r"4 characters .* 7 more .* 10 \(--max-waiting-chars\).* 3 s"
    ) as caught:
        check_waiting_chars(4, 7, **limits)
    assert caught.value.retry_after_s == 3


def test_tokens_of_one_request() -> None:
    check_num_output_tokens(2, 3, 4, max_request_tokens=24)
    with pytest.raises(RequestError, match=r"24 tokens, at most 23 .*--max-request-tokens") as caught:
        check_num_output_tokens(2, 3, 4, max_request_tokens=23)
    assert caught.value.param == "max_tokens"

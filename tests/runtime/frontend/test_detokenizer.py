"""Stop strings and held-back text: the stream equals the whole text, cut."""

import pytest
from corun.runtime.frontend.detokenizer import StopFinder, StoppingDetokenizer
from hypothesis import example, given
from hypothesis import strategies as st

texts = st.text("ab€", max_size=30)
stops = st.lists(st.text("ab€", min_size=1, max_size=5), min_size=1, max_size=4)


class ListStream:
    """Token i is the i-th piece of text."""

    stop = None

    def __init__(self, pieces: list[str]) -> None:
        self._pieces = pieces

    def push(self, token_id: int) -> str:
        return self._pieces[token_id]

    def hide(self, token_id: int) -> str:
        return ""

    def finish(self) -> str:
        return ""


def first_match(text: str, stops: list[str], *, first_end: int = 0) -> tuple[int, str] | None:
    """Return where the earliest-ending, longest match begins, and its stop string."""
    for end in range(max(1, first_end), len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return end - len(longest), longest
    return None


def run(
    pieces: list[str], stops: list[str], *, include: bool = False, min_tokens: int = 0
) -> tuple[list[str], str | None, int]:
    """Return the text shown after every token, the stop string, and the tokens used."""
    detokenizer = StoppingDetokenizer(
        ListStream(pieces), stops=stops, include_stop_in_text=include, min_tokens=min_tokens
    )
    shown = []
    for token_id in range(len(pieces)):
        shown.append(detokenizer.push(token_id))
        if detokenizer.stop is not None:
            return shown, detokenizer.stop, token_id + 1
    shown.append(detokenizer.finish())
    return shown, None, len(pieces)


def cut(text: str, sizes: list[int]) -> list[str]:
    """Cut ``text`` into pieces of these sizes, empty ones among them."""
    pieces = []
    for size in sizes:
        pieces.append(text[:size])
        text = text[size:]
    return [*pieces, text]


@given(texts, stops, st.lists(st.integers(0, 6), max_size=12), st.booleans())
@example("aab", ["ab"], [1, 1], False)
@example("ababa", ["aba", "b"], [5], True)
def test_streamed_text_is_the_cut_text(text: str, stops: list[str], sizes: list[int], include: bool) -> None:
    shown, stop, _ = run(cut(text, sizes), stops, include=include)
    match = first_match(text, stops)
    if match is None:
        assert ("".join(shown), stop) == (text, None)
    else:
        start, found = match
        end = start + len(found) if include else start
        assert ("".join(shown), stop) == (text[:end], found)


@given(texts, stops, st.lists(st.integers(0, 6), max_size=12))
def test_no_more_is_held_back_than_could_still_match(text: str, stops: list[str], sizes: list[int]) -> None:
    pieces = cut(text, sizes)
    shown, _, num_tokens = run(pieces, stops)
    for index in range(num_tokens - 1):
        known = "".join(pieces[: index + 1])
        held = known[len("".join(shown[: index + 1])) :]
        assert all(
            not stop.startswith(known[-length:])
            for stop in stops
            for length in range(len(held) + 1, len(known) + 1)
        )
        assert not held or any(stop.startswith(held) for stop in stops)


@given(texts, stops, st.integers(0, 8))
def test_min_tokens_delays_the_stop(text: str, stops: list[str], min_tokens: int) -> None:
    pieces = list(text)  # a token per character, so that tokens are positions
    shown, stop, num_tokens = run(pieces, stops, min_tokens=min_tokens)
    match = first_match(text, stops, first_end=min_tokens)
    if match is None:
        assert ("".join(shown), stop) == (text, None)
    else:
        start, found = match
        assert ("".join(shown), stop) == (text[:start], found)
        assert num_tokens >= min_tokens


def test_a_stop_string_across_three_tokens() -> None:
    shown, stop, num_tokens = run(["Hello <", "|e", "nd|> more"], ["<|end|>"])
    assert shown == ["Hello ", "", ""]
    assert (stop, num_tokens) == ("<|end|>", 3)


def test_a_near_miss_is_shown_in_the_end() -> None:
    shown, stop, _ = run(["a <", "|e"], ["<|end|>"])
    assert shown == ["a ", "", "<|e"]
    assert stop is None


def test_long_stop_strings_cost_no_more_per_character() -> None:
    finder = StopFinder(["a" * 50_000 + "b"], include_stop_in_text=False)
    text, stop = finder.feed("a" * 200_000, may_stop=True)
    assert (len(text), stop) == (150_000, None)
    assert finder.feed("b", may_stop=True) == ("", "a" * 50_000 + "b")


@pytest.mark.parametrize("include", [False, True])
def test_text_after_the_stop_in_the_same_token_is_dropped(include: bool) -> None:
    shown, stop, _ = run(["one STOP two"], ["STOP"], include=include)
    assert shown == ["one STOP" if include else "one "]
    assert stop == "STOP"

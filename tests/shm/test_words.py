"""Arithmetic of words that wrap around, in Python and compiled."""

import pytest
from corun.shm import atomics
from corun.shm.words import distance, has_reached, wrap
from hypothesis import given
from hypothesis import strategies as st

_EDGES = [0, 1, -1, 2**31 - 1, -(2**31), 2**31 - 2, -(2**31) + 1]
_words = st.integers(-(2**31), 2**31 - 1) | st.sampled_from(_EDGES)


@pytest.mark.parametrize(
    ("value", "expected"), [(0, 0), (2**31, -(2**31)), (2**32, 0), (2**32 - 1, -1), (-(2**31) - 1, 2**31 - 1)]
)
def test_wrap_keeps_32_bits(value: int, expected: int) -> None:
    assert wrap(value) == expected


@given(_words, st.integers(0, 2**31 - 1))
def test_a_word_has_reached_what_lies_before_it(target: int, steps: int) -> None:
    value = wrap(target + steps)
    assert has_reached(value, target)
    assert atomics.has_reached(value, target)
    assert distance(value, target) == steps
    assert has_reached(target, value) == (steps == 0)


@given(_words, _words)
def test_compiled_and_plain_words_agree(value: int, target: int) -> None:
    assert atomics.has_reached(value, target) == has_reached(value, target)
    assert has_reached(value, target) == (distance(value, target) >= 0)

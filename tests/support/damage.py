"""Damaged inputs: random bytes, and genuine ones with a few edits."""

from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

# Texts that a parser may trip over, in any place.
_SPLINTERS = st.sampled_from(
    [
        b"",
        b"\0",
        b"\xff",
        b"\xed\xa0\x80",
        b'"',
        b"\\",
        b"\\ud800",
        b"{",
        b"}",
        b"[",
        b"]",
        b",",
        b":",
        b"null",
        b"true",
        b"NaN",
        b"-1",
        b"-0",
        b"0.5",
        b"1e999",
        b"9" * 30,
        b"9" * 5000,
        b"[" * 3000,
        b'{"a":' * 3000,
        b"\xef\xbb\xbf",
    ]
)

_SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from([2**31, -(2**63), 10**400, "x" * 10_000])
)
JSON_VALUES: st.SearchStrategy[Any] = st.recursive(
    _SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)

_Edit = tuple[int, int, bytes]  # a place, bytes that are left out there, and bytes that come there


def few_and_many(num_cases: int) -> settings:
    """Return settings of a test with so many cases, the same ones each time."""
    return settings(
        max_examples=num_cases,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


def damaged(genuine: bytes) -> st.SearchStrategy[bytes]:
    """Return random bytes, cut ones, and ones with up to four edits."""
    places = st.integers(0, len(genuine))
    edits = st.lists(
        st.tuples(places, st.integers(0, 8), st.binary(max_size=8) | _SPLINTERS), min_size=1, max_size=4
    )
    return (
        st.binary(max_size=256)
        | places.map(lambda end: genuine[:end])
        | edits.map(lambda chosen: _edited(genuine, chosen))
    )


def _edited(data: bytes, edits: list[_Edit]) -> bytes:
    for place, num_left_out, new in edits:
        data = data[:place] + new + data[place + num_left_out :]
    return data

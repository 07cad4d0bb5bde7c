"""Segments of adapters, as a GPU's programs share them."""

import pytest
from corun.gpu.forward.lower import FEW_TOKENS, cut_segments

_SEGMENTS = [(0, 1, 7), (1, 18, 4), (30, 62, 4), (70, 1000, 5)]


@pytest.mark.parametrize(("num_tokens", "longest"), [(FEW_TOKENS, 4), (FEW_TOKENS + 1, 32)])
def test_pieces_are_the_segments_in_order(num_tokens: int, longest: int) -> None:
    pieces = cut_segments(_SEGMENTS, num_tokens)
    tokens = [(token, row) for start, end, row in pieces for token in range(start, end)]
    assert tokens == [(token, row) for start, end, row in _SEGMENTS for token in range(start, end)]
    assert max(end - start for start, end, _ in pieces) == longest
    # A segment has no more pieces than it needs.
    assert len(pieces) == sum(-(-(end - start) // longest) for start, end, _ in _SEGMENTS)

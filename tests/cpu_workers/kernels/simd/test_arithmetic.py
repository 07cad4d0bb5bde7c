"""The choice of arithmetic for bfloat16, and the loop in registers that measures it."""

from collections.abc import Iterator

import numpy as np
import pytest
from corun.cpu_workers.kernels.simd import arithmetic, isa
from corun.cpu_workers.kernels.simd.layout import (
    BFLOAT16,
    BFLOAT16_DOT,
    BFLOAT16_TILES,
    FLOAT32,
    INT4,
    INT8,
    W8A8,
)

_HAS_DOT = isa.process_isa().has_bfloat16_dot
_TAGS = [FLOAT32, BFLOAT16, *([BFLOAT16_DOT] if _HAS_DOT else [])]


@pytest.fixture(autouse=True)
def _asked_anew() -> Iterator[None]:
    arithmetic.bfloat16_tag.cache_clear()
    yield
    arithmetic.bfloat16_tag.cache_clear()


@pytest.mark.parametrize("tag", _TAGS, ids=lambda tag: tag.dtype.name)
def test_the_loop_multiplies_as_often_as_it_says(tag: np.generic) -> None:
    loops = 1000
    products = arithmetic.products_per_loop(tag) * loops
    # A lane of every sum takes its share of products of ones, or of pairs of zero and one.
    per_lane = products / isa.process_isa().lanes
    if tag.dtype == BFLOAT16_DOT.dtype:
        per_lane /= 2
    assert arithmetic.spin(tag, loops) == per_lane


@pytest.mark.parametrize(("tag", "neighbours"), [(INT8, 2), (INT4, 4), (W8A8, 4)])
def test_a_loop_of_integers_multiplies_as_often_as_it_says(tag: np.generic, neighbours: int) -> None:
    """Its time grows as that of float32 does, within what no processor exceeds."""
    assert arithmetic.products_per_loop(tag) == neighbours * arithmetic.products_per_loop(FLOAT32)
    ratio = arithmetic.products_per_s(tag) / arithmetic.products_per_s(FLOAT32)
    # Generic code has no such instructions; the fastest adds eight products where float32 has one.
    assert 0.05 < ratio < 16


@pytest.mark.skipif(not _HAS_DOT, reason="this process has no AVX512_BF16 to choose")
@pytest.mark.parametrize(("pairs", "expected"), [(2.0, BFLOAT16_DOT), (0.5, BFLOAT16)])
def test_pairs_are_multiplied_where_that_is_faster(
    monkeypatch: pytest.MonkeyPatch, pairs: float, expected: np.generic
) -> None:
    rates = {BFLOAT16_DOT.dtype: pairs, BFLOAT16.dtype: 1.0}
    monkeypatch.setattr(arithmetic, "products_per_s", lambda tag: rates[tag.dtype])
    monkeypatch.setattr(arithmetic, "is_forced", lambda: False)
    assert arithmetic.bfloat16_tag().dtype == expected.dtype
    assert ("without pairs" in arithmetic.describe()) == (expected is BFLOAT16)


def test_a_level_without_pairs_measures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arithmetic, "process_isa", lambda: isa.LEVELS[-1])
    monkeypatch.setattr(arithmetic, "has_matrix_registers", lambda: False)
    monkeypatch.delattr(arithmetic, "products_per_s")
    assert arithmetic.bfloat16_tag().dtype == BFLOAT16.dtype
    assert arithmetic.describe() == "generic"


@pytest.mark.skipif(not _HAS_DOT, reason="this process has no AVX512_BF16 to force")
def test_a_forced_level_is_taken_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arithmetic, "is_forced", lambda: True)
    monkeypatch.setattr(arithmetic, "has_matrix_registers", lambda: False)
    monkeypatch.delattr(arithmetic, "products_per_s")
    assert arithmetic.bfloat16_tag().dtype == BFLOAT16_DOT.dtype
    assert arithmetic.describe() == isa.process_isa().name


@pytest.mark.parametrize("has_them", [True, False])
def test_base_weights_use_matrix_registers_where_there_are_any(
    monkeypatch: pytest.MonkeyPatch, has_them: bool
) -> None:
    monkeypatch.setattr(arithmetic, "has_matrix_registers", lambda: has_them)
    expected = BFLOAT16_TILES if has_them else arithmetic.bfloat16_tag()
    assert arithmetic.linear_tag().dtype == expected.dtype
    assert ("(AMX)" in arithmetic.describe()) == has_them

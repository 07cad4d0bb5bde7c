"""Every back end for deltas against the exact product; the bound is derived in ``support``."""

import itertools
import subprocess
import sys
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
from corun.cpu_workers.deltas import numba_backend
from corun.cpu_workers.deltas.base import DeltaBackend, shape_of
from corun.cpu_workers.deltas.numba_backend import NumbaDelta
from corun.cpu_workers.deltas.numpy_backend import NumpyDelta
from corun.cpu_workers.deltas.torch_backend import TorchDelta
from corun.cpu_workers.kernels.lora.regions import TargetShape, plan_packed
from corun.cpu_workers.kernels.simd.arithmetic import bfloat16_tag
from corun.cpu_workers.kernels.simd.layout import BFLOAT16
from corun.shm.errors import FormatError
from hypothesis import given, settings
from hypothesis import strategies as st
from support.deltas import DeltaCase, Workplace, check_case, compute_slices, floats

# What each rounds h to bfloat16.
HIDDEN_ROUNDINGS = {"numba": 0, "numba-portable": 0, "numpy": 0, "torch": 2}
MAKE: dict[str, Callable[[], DeltaBackend]] = {
    "numba": NumbaDelta,
    "numba-portable": partial(NumbaDelta, tag=BFLOAT16),
    "numpy": NumpyDelta,
    "torch": TorchDelta,
}
BACKENDS = {name: make() for name, make in MAKE.items()}
every_backend = pytest.mark.parametrize("name", BACKENDS)


def _check(name: str, case: DeltaCase) -> None:
    check_case(BACKENDS[name], case, hidden_roundings=HIDDEN_ROUNDINGS[name])


@every_backend
@pytest.mark.parametrize("rank", [1, 2, 3, 7, 8, 9, 15, 16, 17, 33, 64, 100, 127, 128, 255, 256])
def test_ranks(name: str, rank: int) -> None:
    _check(name, DeltaCase(9, 192, (96, 32, 32), (rank, rank, rank)))


@every_backend
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 4, 5, 7, 8, 9, 12, 15, 16, 63, 64, 65, 100, 130])
def test_odd_slices(name: str, num_tokens: int) -> None:
    _check(name, DeltaCase(num_tokens, 128, (64, 48), (12, 5)))


@every_backend
@pytest.mark.parametrize("ranks", [(8, 0, 24), (0, 3, 0), (0, 0, 0), (256, 1, 9), (1, 40, 0)])
def test_targets_of_different_ranks_and_missing_ones(name: str, ranks: tuple[int, ...]) -> None:
    _check(name, DeltaCase(11, 96, (80, 16, 33), ranks, scalings=(2.0, -0.37, 1.0)))


@every_backend
@pytest.mark.parametrize(("in_features", "out_features"), [(1, 1), (37, 70), (130, 17), (15, 16)])
def test_widths_that_are_no_multiple_of_the_padding(name: str, in_features: int, out_features: int) -> None:
    _check(name, DeltaCase(10, in_features, (out_features, 1), (5, 3)))


@every_backend
def test_wide_x_is_cut_into_several_blocks(name: str) -> None:
    _check(name, DeltaCase(20, 30000, (16,), (3,)))


@st.composite
def delta_cases(draw: st.DrawFn) -> DeltaCase:
    widths = st.integers(1, 100)
    ranks = st.integers(0, 80)  # all ranks have their own test
    sizes = st.floats(2.0**-10, 4.0, width=32)  # the bound is for what does not underflow
    scalings = st.one_of(st.just(0.0), sizes, sizes.map(lambda size: -size))
    targets = draw(st.lists(st.tuples(widths, ranks, scalings), min_size=1, max_size=3))
    return DeltaCase(
        num_tokens=draw(st.integers(1, 130)),
        in_features=draw(st.integers(1, 160)),
        out_features=tuple(width for width, _, _ in targets),
        ranks=tuple(rank for _, rank, _ in targets),
        scalings=tuple(scaling for _, _, scaling in targets),
        seed=draw(st.integers(0, 1000)),
    )


@every_backend
@settings(max_examples=15, deadline=None, derandomize=True)
@given(case=delta_cases())
def test_drawn_shapes(name: str, case: DeltaCase) -> None:
    _check(name, case)


@every_backend
def test_slices_of_several_adapters_in_turn(name: str) -> None:
    """One back end, as in a worker: scratch memory of one job must not reach the next."""
    backend = MAKE[name]()
    places = [
        Workplace(DeltaCase(130, 160, (64, 32), ranks, seed=seed))
        for seed, ranks in enumerate([(8, 8), (256, 0), (1, 33)])
    ]
    bounds = [0, 1, 4, 11, 64, 65, 97, 130]
    for first, last in itertools.pairwise(bounds):
        for place in places:
            compute_slices(backend, place, (first, last))
    for place in places:
        place.check(hidden_roundings=HIDDEN_ROUNDINGS[name])


@every_backend
def test_what_is_not_finite_shows(name: str) -> None:
    """A model that overflows must not be answered with ordinary numbers."""
    place = Workplace(DeltaCase(4, 64, (32,), (4,)))
    job = place.job()
    wide = place.wide_x  # the job's x, not the copy that results are compared with
    wide[3, 5] = 0x7F80  # infinity, in the second token
    wide[4, 5] = 0x7FFF  # a NaN with bits that would carry if rounded like a number
    BACKENDS[name].compute(job)
    y = floats(place.y)
    assert not np.any(np.isfinite(y[1])) and np.all(np.isnan(y[2]))
    assert np.all(np.isfinite(y[0])) and np.all(np.isfinite(y[3]))


@pytest.mark.parametrize("name", ["numba", "numba-portable", "numpy"])
def test_a_sum_halfway_between_two_values_is_rounded_to_the_even_one(name: str) -> None:
    # Of 1 + 2^-8 and 1 + 3 * 2^-8: down to 1, up to 1 + 2^-6.
    place = Workplace(DeltaCase(2, 16, (16,), (2,), scalings=(1.0,)))
    matrices = place.matrices[0]
    assert matrices is not None
    halves = {1.0: 0x3F80, 2.0**-8: 0x3B80, 3 * 2.0**-8: 0x3C40}
    place.wide_x[2:4, :16] = 0
    place.wide_x[2:4, 0] = halves[1.0]
    place.wide_x[2, 1], place.wide_x[3, 1] = halves[2.0**-8], halves[3 * 2.0**-8]
    a, b = np.zeros((2, 16), np.uint16), np.zeros((16, 2), np.uint16)
    a[0, 0] = a[1, 1] = halves[1.0]
    b[:] = halves[1.0]
    place.rewrite([type(matrices)(a, b)])
    BACKENDS[name].compute(place.job())
    assert np.all(floats(place.y[0]) == 1.0) and np.all(floats(place.y[1]) == 1 + 2.0**-6)


def test_regions_that_are_not_for_workers_are_refused() -> None:
    with pytest.raises(FormatError, match="not 4"):
        shape_of(plan_packed(64, 4, [TargetShape(8, 64, 1.0)]), 1)
    with pytest.raises(FormatError, match="not 257"):
        shape_of(plan_packed(64, 2, [TargetShape(257, 64, 1.0)]), 1)


def test_the_machine_decides_about_the_dot_instruction(monkeypatch: pytest.MonkeyPatch) -> None:
    tags: list[np.generic] = []
    monkeypatch.setattr(numba_backend, "store_delta", lambda tag, *_: tags.append(tag))
    NumbaDelta().compute(Workplace(DeltaCase(4, 64, (32,), (4,))).job())
    assert [tag.dtype for tag in tags] == [bfloat16_tag().dtype]


def test_torch_is_loaded_only_if_chosen() -> None:
    code = (
        "import sys; from corun.cpu_workers.deltas.select import make_backend; "
        "made = [make_backend(name) for name in ('numpy', 'numba')]; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

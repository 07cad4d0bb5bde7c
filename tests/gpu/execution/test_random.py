"""Random numbers by (seed, position)."""

import numpy as np
from corun.gpu.execution.draws import uniform


def numbers(seeds: list[int], positions: list[int]) -> np.ndarray:
    return uniform(np.array(seeds, dtype=np.uint64), np.array(positions, dtype=np.uint64))


def test_depends_on_seed_and_position_alone() -> None:
    batch = numbers([1, 2, 1], [5, 5, 6])
    assert batch[0] == numbers([1], [5])[0]
    assert len(set(batch.tolist())) == 3


def test_is_uniform_over_seeds_and_over_positions() -> None:
    for sample in (numbers([7] * 20000, list(range(20000))), numbers(list(range(20000)), [3] * 20000)):
        assert ((sample >= 0) & (sample < 1)).all()
        counts, _ = np.histogram(sample, bins=20, range=(0, 1))
        # 19 degrees of freedom; the 99.99 % point of chi squared is 53.
        assert ((counts - 1000) ** 2 / 1000).sum() < 53


def test_neighbouring_streams_are_not_shifted_copies() -> None:
    first = numbers([10] * 1000, list(range(1000)))
    second = numbers([11] * 1000, list(range(1000)))
    assert not set(first.tolist()) & set(second.tolist())

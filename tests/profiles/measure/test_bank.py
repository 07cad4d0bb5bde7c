"""Batches of mixed ranks."""

import random

from corun.profiles.measure.bank import BankAdapter, draw_batches

_RANKS = (8, 16, 32, 64, 128)
_BANK = tuple(BankAdapter(row, _RANKS[row % 5], 1000 * _RANKS[row % 5]) for row in range(32))


def test_batches_have_their_sizes_and_no_adapter_twice() -> None:
    batches = draw_batches(_BANK, (4, 8, 32), 5, random.Random(1))
    assert [len(batch) for batch in batches] == [4] * 5 + [8] * 5 + [32]
    assert all(len(set(batch)) == len(batch) for batch in batches)


def test_sums_of_ranks_are_spread() -> None:
    batches = draw_batches(_BANK, (8,), 20, random.Random(1))
    sums = [sum(adapter.rank for adapter in batch) for batch in batches]
    assert min(sums) < 8 * 24
    assert max(sums) > 8 * 72


def test_the_same_seed_draws_the_same() -> None:
    drawn = [draw_batches(_BANK, (4, 8), 3, random.Random(7)) for _ in range(2)]
    assert drawn[0] == drawn[1]

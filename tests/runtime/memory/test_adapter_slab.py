"""Ranges of adapters: a load always finds the room that the slab reports."""

import random

from corun.runtime.memory.adapter_slab import AdapterSlab, room_bytes
from corun.runtime.plan import AdapterId

KIB = 1024


def full_of(*sizes_kib: int) -> AdapterSlab:
    """Adapters 1, 2, ... of these sizes, one behind the other."""
    slab = AdapterSlab(sum(sizes_kib) * KIB)
    for number, size_kib in enumerate(sizes_kib, start=1):
        slab.take(AdapterId(number), size_kib * KIB)
    return slab


def ids(*numbers: int) -> tuple[AdapterId, ...]:
    return tuple(map(AdapterId, numbers))


def test_what_is_free_in_sum_may_be_in_pieces() -> None:
    slab = full_of(1, 1, 1, 1)
    slab.free(AdapterId(1))
    slab.free(AdapterId(3))
    assert slab.capacity_bytes - slab.taken_bytes == 2 * KIB
    assert slab.fits(KIB) and not slab.fits(2 * KIB)
    slab.free(AdapterId(2))
    assert slab.fits(3 * KIB)
    slab.check_invariants()


def test_only_those_go_in_whose_place_the_newcomer_comes() -> None:
    slab = full_of(1, 2, 1, 1)
    assert slab.victims(KIB, ids(3, 1)) == ids(3)
    # 1 and 4 went first, but they are apart; with 2 there is room, and 4 need not go.
    assert slab.victims(3 * KIB, ids(1, 4, 2, 3)) == ids(1, 2)
    assert slab.victims(3 * KIB, ids(1, 4)) is None, "the sum would do"
    assert slab.taken_bytes == slab.capacity_bytes, "nothing was done"
    slab.free(AdapterId(3))
    assert slab.victims(2 * KIB, ids(1, 4)) == ids(4), "what is free counts"
    assert slab.victims(KIB, ids(1)) == ()


def test_sizes_are_rounded_up_to_what_is_taken() -> None:
    slab = AdapterSlab(3 * 64 + 63)
    assert slab.capacity_bytes == 3 * 64
    assert slab.fits(129) and not slab.fits(193)
    slab.take(AdapterId(1), room_bytes(65))
    assert slab.fits(64) and not slab.fits(65)
    assert slab.offset_bytes(AdapterId(1)) % 64 == 0


def test_victims_make_the_room_that_is_asked_for() -> None:
    """After any sequence of adapters."""
    for seed in range(50):
        rng = random.Random(seed)
        slab, there = AdapterSlab(40 * KIB), list[AdapterId]()
        for number in range(1, 60):
            size_bytes = room_bytes(rng.randint(1, 12 * KIB))
            ranked = rng.sample(there, len(there))
            held, may_go = ranked[: len(ranked) // 4], ranked[len(ranked) // 4 :]
            victims = slab.victims(size_bytes, may_go)
            if victims is None:
                assert held, "without held adapters there is always room"
                continue
            assert not slab.fits(size_bytes) or victims == ()
            for victim in victims:
                slab.free(victim)
                there.remove(victim)
            assert slab.fits(size_bytes)
            slab.take(AdapterId(number), size_bytes)
            there.append(AdapterId(number))
            slab.check_invariants()

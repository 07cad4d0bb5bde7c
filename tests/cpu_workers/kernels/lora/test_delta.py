"""The compiled delta; what it computes is tested with its back end, in ``deltas``."""

from corun.cpu_workers.kernels.lora import delta
from corun.cpu_workers.kernels.lora.regions import TargetShape, plan_packed
from corun.cpu_workers.kernels.simd import layout
from corun.shm import region
from support.deltas import DeltaCase, Workplace


def test_scratch_is_enough_for_any_region() -> None:
    # Rows of a block hold all ranks, each target padded to whole tiles.
    targets = [TargetShape(delta.MAX_RANK, 16, 1.0)] * region.MAX_TARGETS
    padded = -(-delta.MAX_RANK // layout.RANKS_PER_TILE) * layout.RANKS_PER_TILE
    needed_bytes = 4 * padded * len(plan_packed(16, 2, targets).targets) * delta.MAX_BLOCK_TOKENS
    assert needed_bytes <= delta.SCRATCH_BYTES


def test_a_region_says_itself_what_is_in_it() -> None:
    """The only reference of a job to an adapter is the place of a region."""
    place = Workplace(DeltaCase(1, 48, (32, 16), (5, 0)))
    job = place.job()
    bytes_read = place.region_bytes()
    assert region.read_header(bytes_read) == job.region
    assert job.region_address % region.ALIGNMENT_BYTES == 0

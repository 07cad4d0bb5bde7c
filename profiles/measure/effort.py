"""The effort of measuring: sizes, and seconds of each part."""

from dataclasses import dataclass, replace
from typing import Any

from ..rounds import Repeats

REFERENCE_RANK = 64  # of figures that are given for one rank
BATCH_SIZES = (4, 8, 16, 32)  # of the decode batches with adapters
BATCH_RANKS = (8, 16, 32, 64, 128)


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """Sizes ascend; sizes beyond the limits of model and options are cut off."""

    step_tokens: tuple[int, ...]  # of prefill rows, and of base products
    decode_rows: tuple[int, ...]
    chunk_tokens: tuple[int, ...]  # of the prefill rows of whole steps
    context_tokens: tuple[int, ...]  # of rows of whole steps, their own tokens included
    max_kv_tokens: int  # of all rows of a step, unless one row needs more
    max_kv_bytes: int  # the same in bytes
    delta_tokens: tuple[int, ...]
    delta_ranks: tuple[int, ...]
    invocation_tokens: tuple[int, ...]
    num_batches: int  # of each of ``BATCH_SIZES``
    prefill_tokens: tuple[int, ...]
    prefill_ranks: tuple[int, ...]
    chunk_bytes: tuple[int, ...]
    concurrency: tuple[int, ...]
    max_adapters_bytes: int  # of a batch's adapters on the device
    base: Repeats
    steps: Repeats
    deltas: Repeats
    invocation: Repeats
    link: Repeats
    lora_decode: Repeats
    lora_prefill: Repeats
    parts: tuple[str, ...] = ("base", "steps", "link", "deltas", "invocation", "lora_decode", "lora_prefill")

    def __post_init__(self) -> None:
        assert self.delta_ranks == tuple(sorted(self.delta_ranks)), self.delta_ranks
        assert REFERENCE_RANK in self.delta_ranks, self.delta_ranks

    @property
    def budget_s(self) -> float:
        """Seconds of all parts together."""
        return sum(self.repeats(part).budget_s for part in self.parts)

    def within(self, budget_s: float) -> "Effort":
        """The same effort within ``budget_s``, as far as a profile's minimum permits.

        More time is for more rounds.
        """
        share = budget_s / self.budget_s
        changes: dict[str, Any] = {part: self.repeats(part).scaled(share) for part in self.parts}
        return replace(self, **changes)

    def repeats(self, part: str) -> Repeats:
        """Repeats of one part."""
        found = getattr(self, part)
        assert isinstance(found, Repeats)
        return found


_KIB, _MIB = 2**10, 2**20

EFFORT = Effort(
    step_tokens=(1, 4, 16, 64, 128, 256, 512),
    decode_rows=(1, 4, 8, 16, 32),
    chunk_tokens=(16, 64, 256),
    context_tokens=(256, 2048),
    max_kv_tokens=8192,
    max_kv_bytes=1024 * _MIB,
    delta_tokens=(1, 8, 32, 128, 256),
    delta_ranks=(8, 64, 128),
    invocation_tokens=(8, 64, 128),
    num_batches=4,
    prefill_tokens=(8, 32, 128),
    prefill_ranks=(8, 32, 128),
    chunk_bytes=(64 * _KIB, 256 * _KIB, _MIB, 4 * _MIB),
    concurrency=(1, 2),
    max_adapters_bytes=256 * _MIB,
    base=Repeats(7.0, 3, 7),
    steps=Repeats(4.5, 3, 10),
    deltas=Repeats(4.5, 3, 7),
    invocation=Repeats(2.0, 3, 15),
    link=Repeats(1.5, 3, 15),
    lora_decode=Repeats(3.5, 3, 7),
    lora_prefill=Repeats(3.5, 3, 7),
)

"""How the scheduler asks when requests may start whose adapter is still being loaded.

The scheduler knows rows, its ``ColdStarts`` knows times, and what is under way both read in the
memory's table of transfers. Without one that predicts, every request waits for its adapter:
``WarmStarts``.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from ..plan import RequestId, StepId
from ..request import Request
from .events import ColdStart

# A low guess, because the first layer group that is read corrects it.
FIRST_FILE_BYTES_PER_S = 100e6


@dataclass(frozen=True, slots=True)
class ColdChunk:
    """What the next step computes of a cold request."""

    num_tokens: int
    split_layer: int  # workers compute the deltas of the layers below


@dataclass(slots=True, eq=False)
class StepRows:
    """The rows of a step, as far as it is put together. Changed by its draft alone."""

    max_cold_tokens: int  # that a step may have of all its cold requests
    is_decode_separate: bool  # rows that decode have a forward of their own, before the others
    decodes: list[Request] = field(default_factory=list)  # warm, with one token to compute
    chunks: list[tuple[Request, int]] = field(default_factory=list)  # warm; and how many tokens
    cold_chunks: list[tuple[Request, ColdChunk]] = field(default_factory=list)


class ColdStarts(Protocol):
    """Decides for requests whose adapter is loading."""

    @property
    def file_bytes_per_s(self) -> float:
        """At which adapters are read from files, as far as it is known."""
        ...

    def workers_changed(self, num_ready: int) -> None:
        """So many CPU workers take jobs from now on; until the first call none does."""
        ...

    def files_read(self, num_bytes: int, duration_s: float) -> None:
        """So many bytes of adapters have been read from files, which took so long."""
        ...

    def may_start(self, request: Request, num_others: int, rows: StepRows, now_s: float) -> bool:
        """Whether ``request``, whose adapter is loading, runs from now on beside the others."""
        ...

    def next_chunk(
        self, request: Request, max_tokens: int, num_others: int, rows: StepRows, now_s: float
    ) -> ColdChunk | None:
        """What to compute next of a cold running request; None = it skips this step."""
        ...

    def step_closed(self, step_id: StepId, rows: StepRows, now_s: float) -> None:
        """A step has these rows, and no more; without rows it may not come to be."""
        ...

    def step_ended(self, step_id: StepId, now_s: float) -> None:
        """Its result is there."""
        ...

    def blocks_all_requests(self) -> bool:
        """Whether nothing may be computed before a load has ended (the blocking baseline)."""
        ...

    def on_first_token(self, request_id: RequestId, now_s: float) -> ColdStart | None:
        """The first token of a request has come back; how it was started if it came cold."""
        ...

    def counts(self) -> Mapping[str, int]:
        """Requests that came cold, by strategy."""
        ...

    def discard(self, request_id: RequestId) -> None:
        """The request has ended."""
        ...


class WarmStarts:
    """Every request waits until its adapter is on the device."""

    file_bytes_per_s = FIRST_FILE_BYTES_PER_S

    def workers_changed(self, num_ready: int) -> None:
        """Nothing is kept."""

    def files_read(self, num_bytes: int, duration_s: float) -> None:
        """Nothing is kept."""

    def may_start(self, request: Request, num_others: int, rows: StepRows, now_s: float) -> bool:
        """It may not."""
        return False

    def next_chunk(
        self, request: Request, max_tokens: int, num_others: int, rows: StepRows, now_s: float
    ) -> ColdChunk | None:
        """No request is cold."""
        raise AssertionError("no request may start cold")

    def step_closed(self, step_id: StepId, rows: StepRows, now_s: float) -> None:
        """Nothing is kept."""

    def step_ended(self, step_id: StepId, now_s: float) -> None:
        """Nothing is kept."""

    def blocks_all_requests(self) -> bool:
        """Loads disturb nobody."""
        return False

    def on_first_token(self, request_id: RequestId, now_s: float) -> ColdStart | None:
        """No request is cold."""
        return None

    def counts(self) -> Mapping[str, int]:
        """No request is cold."""
        return {}

    def discard(self, request_id: RequestId) -> None:
        """Nothing is kept."""

"""Interface for cold starts: requests that start while their adapter is being loaded.

The scheduler knows the rows of a step, and its ``ColdStarts`` predicts how long they take. Both
read the memory's table of transfers.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..plan import RequestId, StepId
from ..request import Request
from .events import AdapterStart

# Rate of reading files before one was read. It is low; the first layer groups correct it.
FIRST_FILE_BYTES_PER_S = 100e6


@dataclass(frozen=True, slots=True)
class ColdChunk:
    """Tokens of a cold request that the next step computes."""

    num_tokens: int
    split_layer: int  # workers compute the deltas of layers below


@dataclass(slots=True, eq=False)
class StepRows:
    """The rows of a step so far. Only its draft changes them."""

    max_cold_tokens: int  # limit of one step for all cold requests
    is_decode_separate: bool  # decode rows have a separate forward pass, before the others
    decodes: list[Request] = field(default_factory=list)  # warm, with one token to compute
    chunks: list[tuple[Request, int]] = field(default_factory=list)  # warm, with tokens
    cold_chunks: list[tuple[Request, ColdChunk]] = field(default_factory=list)
    is_cold_separate: bool = False  # cold rows have a separate forward pass, after the others


class ColdStarts:
    """Decides when requests with a loading adapter start, and what they compute.

    As it is, every request waits until its adapter is on the device. Subclasses decide otherwise.
    """

    @property
    def file_bytes_per_s(self) -> float:
        """Estimated rate at which adapter files are read."""
        return FIRST_FILE_BYTES_PER_S

    def workers_changed(self, num_ready: int) -> None:
        """Set the number of CPU workers that take jobs. It is 0 until the first call."""

    def files_read(self, num_bytes: int, duration_s: float) -> None:
        """Record that reading ``num_bytes`` from adapter files took ``duration_s``."""

    def may_start(self, request: Request, num_others: int, rows: StepRows, now_s: float) -> bool:
        """Whether ``request`` starts now, while its adapter is loading."""
        return False

    def waits(self, request: Request) -> None:
        """Record that ``request`` waits for its load, as the step has no room for a cold row."""

    def next_chunk(
        self, request: Request, max_tokens: int, num_others: int, rows: StepRows, now_s: float
    ) -> ColdChunk | None:
        """Return the next chunk of a cold running request; None = it skips this step."""
        raise AssertionError("no request may start cold")

    def step_closed(self, step_id: StepId, rows: StepRows, now_s: float) -> None:
        """Record the final rows of a step. A step without rows is not always issued."""

    def step_ended(self, step_id: StepId, now_s: float) -> None:
        """Record that the result of a step has arrived."""

    def blocks_all_requests(self) -> bool:
        """Whether no request may compute until a load has ended (the blocking baseline)."""
        return False

    def on_first_token(self, request_id: RequestId, now_s: float) -> AdapterStart | None:
        """Record the first token of a request. Return how it was started, if it was cold."""
        return None

    def counts(self) -> Mapping[str, int]:
        return {}

    def discard(self, request_id: RequestId) -> None:
        """Drop the record of a request that has ended."""

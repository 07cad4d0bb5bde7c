"""Where a request's time in the engine went, as reported to its caller."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(slots=True)
class EngineTiming:
    """Where a choice's time in the engine went until its first token, or its end without one."""

    parts: Mapping[
        str, float
    ]  # seconds, by values of ``scheduler.events.TimePart``; not those of 0
    num_predicted_output_tokens: int
    num_host_cached_tokens: int = 0  # of the prompt, with KV from the host
    num_preemptions: int = 0  # until it ended, squashes included
    num_squashes: int = 0
    adapter_version: str = ""  # digests of what it computed with; "" = the base model

    @property
    def first_token_s(self) -> float:
        """All of it."""
        return sum(self.parts.values())

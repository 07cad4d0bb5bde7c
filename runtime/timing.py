"""How a request spent its time in the engine, as reported to its caller."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(slots=True)
class EngineTiming:
    """How a choice spent its time in the engine until its first token, or its end without one."""

    parts: Mapping[str, float]  # seconds, by values of ``TimePart``, without zeros
    num_predicted_output_tokens: int
    num_host_cached_tokens: int = 0  # prompt tokens with KV from the host
    num_preemptions: int = 0  # squashes included
    num_squashes: int = 0
    adapter_version: str = ""  # ``AdapterVersion.label``; "" = the base model

    @property
    def first_token_s(self) -> float:
        """Sum of all parts."""
        return sum(self.parts.values())

"""The record of a request that generates, made at its end, with any outcome.

A record never holds a prompt or an answer. ``/metrics`` counts records, ``--request-log`` writes
them.
"""

from collections.abc import Iterator, Mapping, Sequence

import msgspec

FINISHED, ABORT, REFUSED, ERROR = "finished", "abort", "refused", "error"


class ChoiceRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One choice of a prompt."""

    finish_reason: str  # stop, length, abort, refused or error
    output_tokens: int
    predicted_output_tokens: int | None  # null: the engine had not begun it
    parts_s: Mapping[str, float]  # seconds until its first token, by part
    start_strategy: str | None  # null: its adapter was on the device
    start_reason: str | None
    preemptions: int  # squashes included
    squashes: int


class PromptRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt that was sent to the engine."""

    prompt_tokens: int
    cached_tokens: int  # of these, with cached KV on the device or on the host
    host_cached_tokens: int  # of these, on the host
    adapter_version: str | None  # digests of weights and conventions; null: the base model
    first_token_s: float | None  # since it was sent, to its first token or scores; null: neither
    total_s: float  # since it was sent, to its last token or its end
    choices: Sequence[ChoiceRecord]

    @property
    def is_complete(self) -> bool:
        """Whether all choices finished and were answered."""
        return self.first_token_s is not None and all(
            choice.finish_reason in ("stop", "length") for choice in self.choices
        )


class HttpRequestRecord(msgspec.Struct, kw_only=True):
    """One HTTP request to a route that generates, filled in as it proceeds."""

    arrived_at: float  # Unix time
    id: str  # of its answer
    route: str
    model: str | None = None  # as the request names it; null: no name, or an unreadable body
    adapter: str | None = None  # null: the base model, or an unknown name
    stream: bool = False
    outcome: str = FINISHED  # or abort, refused, error
    status: int | None = None  # null: none was sent, its client left before
    error: str | None = None  # its code, if one ended the request
    total_s: float = 0.0  # until its answer had ended
    prompts: Sequence[PromptRecord] = ()

    @property
    def finish_reasons(self) -> Iterator[str]:
        """Yield one for each choice, or the outcome of a request without choices."""
        reasons = [choice.finish_reason for one in self.prompts for choice in one.choices]
        yield from reasons or [self.outcome]

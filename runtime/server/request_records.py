"""What became of each request that generates: one record, when it has ended, however it has.

Records never hold a prompt or an answer. ``/metrics`` counts them, ``--request-log`` writes them.
"""

from collections.abc import Iterator, Mapping, Sequence

import msgspec

FINISHED, ABORT, REFUSED, ERROR = "finished", "abort", "refused", "error"


class ChoiceRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One choice of a prompt."""

    finish_reason: str  # stop, length, abort, refused or error
    output_tokens: int
    predicted_output_tokens: int | None  # null: the engine had not begun
    parts_s: Mapping[str, float]  # what it waited for until its first token, in seconds
    start_strategy: str | None  # how it was started if its adapter was not on the device
    start_reason: str | None
    preemptions: int  # squashes included
    squashes: int


class PromptRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt that the engine was sent."""

    prompt_tokens: int
    cached_tokens: int  # of them, whose KV was found, on the device or on the host
    host_cached_tokens: int  # of these, on the host
    adapter_version: str | None  # digests of weights and conventions; null: the base model
    first_token_s: float | None  # from when it was sent, or to its scores; null: neither came
    total_s: float  # from then until its last token, or its end
    choices: Sequence[ChoiceRecord]

    @property
    def is_complete(self) -> bool:
        """Whether all choices ended by themselves, and were told."""
        return self.first_token_s is not None and all(
            choice.finish_reason in ("stop", "length") for choice in self.choices
        )


class HttpRequestRecord(msgspec.Struct, kw_only=True):
    """One HTTP request to a route that generates, with what is known of it so far."""

    arrived_at: float  # Unix time
    id: str  # of its answer
    route: str
    model: str | None = None  # as the request named it; null: it named none, or could not be read
    adapter: str | None = None  # null: the base model, or none was found
    stream: bool = False
    outcome: str = FINISHED  # or abort, refused, error
    status: int | None = None  # that was sent; null: its client left before
    error: str | None = None  # the code of what ended it
    total_s: float = 0.0  # until its answer had ended
    prompts: Sequence[PromptRecord] = ()

    @property
    def finish_reasons(self) -> Iterator[str]:
        """Yield one for each choice, or what became of a request that has none."""
        reasons = [choice.finish_reason for one in self.prompts for choice in one.choices]
        yield from reasons or [self.outcome]

"""The arguments and results of ``generate``: plain objects, independent of an engine.

Outputs are not frozen, because one is made for every token, and making a frozen one takes several
times as long.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ..adapters.mix import LoRAMix
from ..scheduler.events import AdapterStart
from ..timing import EngineTiming


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """The name of an adapter and the path of its PEFT directory.

    The name identifies the adapter: the same name with the same path is the same adapter, the
    same name with another path is a new version of it. ``lora_int_id`` is for callers that
    number their adapters; corun ignores it.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str


@dataclass(frozen=True, slots=True)
class Logprob:
    """One candidate for one token: natural logarithm, before temperature and penalties."""

    logprob: float
    rank: int  # 1 = the most likely token
    decoded_token: str  # "bytes:\\xe2\\x82" where the token is a part of a character


TokenCandidates = dict[int, Logprob]  # by token id: the sampled token first, then the best


@dataclass(slots=True)
class ChoiceHistory:
    """The whole output of one choice; outputs share it, each with its own end in it."""

    pieces: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenCandidates] | None = None


@dataclass(slots=True, repr=False, eq=False)
class CompletionOutput:
    """One choice at one moment: its new output since the previous one, and all of it.

    ``text``, ``token_ids`` and ``logprobs`` have all output so far. They are built when read, so
    that a reader of the ``new_`` fields does not pay for them. ``finish_reason`` is "stop",
    "length", "abort" or None; ``stop_reason`` is the stop string or the stop token's id, None for
    an end-of-sequence token.
    """

    index: int
    new_text: str
    new_token_ids: Sequence[int]
    new_logprobs: Sequence[TokenCandidates] | None
    cumulative_logprob: float | None  # sum over the sampled tokens, with ``logprobs``
    finish_reason: str | None
    stop_reason: str | int | None
    history: ChoiceHistory
    num_pieces: int
    num_tokens: int
    num_cached_tokens: int = 0  # of the prompt, with cached KV
    adapter_start: AdapterStart | None = None  # None = adapter on the device, or base model
    timing: EngineTiming | None = None  # with the first token, or the end

    @property
    def text(self) -> str:
        """All text so far; it only grows from one output to the next."""
        return "".join(self.history.pieces[: self.num_pieces])

    @property
    def token_ids(self) -> list[int]:
        """All tokens so far, including the end token, if one ended it."""
        return self.history.token_ids[: self.num_tokens]

    @property
    def logprobs(self) -> list[TokenCandidates] | None:
        """One entry per token so far, if the parameters have ``logprobs``."""
        logprobs = self.history.logprobs
        return None if logprobs is None else logprobs[: self.num_tokens]

    @property
    def finished(self) -> bool:
        """Whether this choice has ended."""
        return self.finish_reason is not None

    def __repr__(self) -> str:
        return (
            f"CompletionOutput(index={self.index}, text={self.text!r}, "
            f"token_ids={self.token_ids}, cumulative_logprob={self.cumulative_logprob}, "
            f"finish_reason={self.finish_reason!r}, stop_reason={self.stop_reason!r})"
        )


@dataclass(slots=True)
class RequestOutput:
    """One prompt's request at one moment. ``outputs`` always holds all its choices."""

    request_id: str
    prompt: str | None  # None if the prompt was given as token ids
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    lora_request: LoRARequest | LoRAMix | str | None = None
    # With ``prompt_logprobs``: an entry per token of the prompt, None for the first.
    prompt_logprobs: list[TokenCandidates | None] | None = None


class RequestWatch(Protocol):
    """Notified when a request begins and ends in the engine. Neither method may raise."""

    def opened(self) -> None:
        """The request was sent to the engine; ``ended`` follows in any case."""

    def ended(self, output: RequestOutput) -> None:
        """All choices of the request have ended in the engine, or the engine is gone.

        ``output`` is the whole output of the request, with nothing new in it. A choice that was
        closed while it ran has the finish reason "abort", a failed one "error".
        """

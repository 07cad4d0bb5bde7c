"""What a caller of ``generate`` gives and gets: plain objects, no engine behind them.

Outputs are not frozen, because one is made for every token, and a frozen one takes several times
as long to make.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ..timing import EngineTiming


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """Names an adapter and says where its PEFT directory is.

    The name identifies the adapter: the same name with the same path is the same adapter, the
    same name with another path a new version of it. ``lora_int_id`` is kept for callers that
    number their adapters; corun does not look at it.
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


TokenCandidates = dict[int, Logprob]  # by token id: the drawn token first, then the best


@dataclass(frozen=True, slots=True)
class AdapterStart:
    """How a choice was started whose adapter was not on the device."""

    strategy: str  # blocking, async_load, pipelined or assisted
    reason: str


@dataclass(slots=True)
class ChoiceHistory:
    """Everything one choice has produced; outputs share it and remember how far they saw it."""

    pieces: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenCandidates] | None = None


@dataclass(slots=True, repr=False, eq=False)
class CompletionOutput:
    """One choice at one moment: what is new since the previous output, and all of it.

    ``text``, ``token_ids`` and ``logprobs`` are everything so far; they are built when read, so
    that a consumer of the ``new_`` fields pays nothing for them. ``finish_reason`` is "stop",
    "length", "abort" or None; ``stop_reason`` is the stop string or the stop token's id, None for
    an end-of-sequence token.
    """

    index: int
    new_text: str
    new_token_ids: Sequence[int]
    new_logprobs: Sequence[TokenCandidates] | None
    cumulative_logprob: float | None  # sum over the drawn tokens, if log-probabilities are asked
    finish_reason: str | None
    stop_reason: str | int | None
    history: ChoiceHistory
    num_pieces: int
    num_tokens: int
    num_cached_tokens: int = 0  # of the prompt, not computed again because its KV was there
    adapter_start: AdapterStart | None = None  # None = the adapter was there, or none was asked for
    timing: EngineTiming | None = None  # with the first token, or the end

    @property
    def text(self) -> str:
        """All text so far; it only grows from one output to the next."""
        return "".join(self.history.pieces[: self.num_pieces])

    @property
    def token_ids(self) -> list[int]:
        """All tokens so far, the end token (if one ended it) included."""
        return self.history.token_ids[: self.num_tokens]

    @property
    def logprobs(self) -> list[TokenCandidates] | None:
        """One entry per token so far, if asked for."""
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
    lora_request: LoRARequest | str | None = None
    # If asked for: an entry per token of the prompt, None for the first, which nothing precedes.
    prompt_logprobs: list[TokenCandidates | None] | None = None


class RequestWatch(Protocol):
    """Is told when a request begins and ends in the engine. Neither method may raise."""

    def opened(self) -> None:
        """The engine has been asked; ``ended`` will follow, whatever happens."""
        ...

    def ended(self, output: RequestOutput) -> None:
        """The engine has said its last word on all choices of the request, or is gone.

        ``output`` is all that there is of the request, with nothing new in it. A choice that was
        left while it ran has the finish reason "abort", one that failed "error".
        """
        ...

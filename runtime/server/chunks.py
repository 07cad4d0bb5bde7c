"""Turns outputs into the events of a stream.

Most chunks of a stream differ only in a few characters of text: the rest of their JSON is written
once per choice, as bytes.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import msgspec

from ..frontend.outputs import CompletionOutput, RequestOutput
from .responses import Timing, Usage


@dataclass(frozen=True, slots=True)
class Envelope:
    """What is the same in an answer and in all chunks of it."""

    id: str
    object: str
    created: int  # Unix time
    model: str


class ChunkEncoder(ABC):
    """Encodes what is new in every output. One per stream."""

    __slots__ = (
        "_encode_json",
        "_ended",
        "_head",
        "_num_choices",
        "_tail",
        "_text_frames",
        "_with_logprobs",
    )

    def __init__(
        self, envelope: Envelope, *, num_choices: int, with_logprobs: bool, with_usage: bool
    ) -> None:
        self._num_choices = num_choices  # per prompt
        self._with_logprobs = with_logprobs
        self._head = b"data: " + msgspec.json.encode(envelope)[:-1] + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if with_usage else b"]}\n\n"
        self._encode_json = msgspec.json.Encoder().encode
        self._text_frames: dict[int, tuple[bytes, bytes]] = {}  # by choice: around its text
        self._ended: set[int] = set()

    def encode(self, prompt_index: int, output: RequestOutput) -> bytes:
        """Return the events for what is new in ``output``, possibly none."""
        events = b""
        for choice in output.outputs:
            index = prompt_index * self._num_choices + choice.index
            frame = self._text_frames.get(index)
            if frame is None:
                before, after = self._around_text(index)
                frame = self._text_frames[index] = (self._head + before, after + self._tail)
                events += self._first_event(prompt_index, index)
            if choice.finish_reason is not None:
                if index not in self._ended:
                    self._ended.add(index)
                    events += self._event(self._part(index, choice))
            elif self._with_logprobs:
                if choice.new_token_ids:
                    events += self._event(self._part(index, choice))
            elif choice.new_text:
                events += frame[0] + self._encode_json(choice.new_text) + frame[1]
        return events

    def last_event(self, usage: Usage | None, timing: Timing | None) -> bytes:
        """Return the event that reports what was asked for and holds no choice, if anything."""
        if usage is None and timing is None:
            return b""
        event = self._head + b"]"
        if usage is not None:
            event += b',"usage":' + self._encode_json(usage)
        if timing is not None:
            event += b',"timing":' + self._encode_json(timing)
        return event + b"}\n\n"

    def _event(self, part: msgspec.Struct) -> bytes:
        return self._head + self._encode_json(part) + self._tail

    @abstractmethod
    def _first_event(self, prompt_index: int, index: int) -> bytes:
        """Return what precedes the first text of choice ``index``, possibly nothing."""

    @abstractmethod
    def _around_text(self, index: int) -> tuple[bytes, bytes]:
        """Return the JSON of choice ``index`` before and after a text that is all it says."""

    @abstractmethod
    def _part(self, index: int, choice: CompletionOutput) -> msgspec.Struct:
        """Return all that is new in ``choice``, with log-probabilities and its end."""

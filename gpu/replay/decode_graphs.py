"""Replays captured decode passes, instead of running the model's modules again.

A decode pass with the same number of rows repeats the same computation on other numbers. For a
small model Python takes a quarter of the time. A graph is captured when a number of rows occurs for
the second time, and replayed only after it has given the same bits as the modules, for inputs other
than those of the capture.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Protocol, Self

import torch

from ..forward.batch import PassMetadata
from ..forward.kernel_threads import num_kernel_threads
from ..fused import residual
from .capture import capture_pass
from .captured_pass import CapturedPass
from .replay_kernel import replay

_LOG = logging.getLogger(__name__)

# Tokens of a pass. With more, Python takes a small part of the time, and each graph needs memory.
_MAX_TOKENS = 32


class RunPass(Protocol):
    """Computes one pass of the model."""

    def __call__(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        logit_indices: torch.Tensor,
        metadata: PassMetadata,
    ) -> torch.Tensor:
        """Return the logits [1, len(logit_indices), vocabulary]; the next pass may change them."""


class _Deltas(Enum):
    NONE = auto()
    RESIDENT = auto()  # of adapters on the device: their kernels are in the graph
    SCALED = auto()  # the same, and some adapters have factors
    OTHER = auto()  # the graph calls for them, group by group

    @classmethod
    def of(cls, metadata: PassMetadata) -> Self:
        if metadata.deltas is None:
            return cls.NONE
        if not metadata.deltas.is_repeatable:
            return cls.OTHER
        return cls.SCALED if metadata.deltas.has_factors else cls.RESIDENT


# Tokens, threads of the kernels, ``PassMetadata.outside``, source of the deltas.
_Kind = tuple[int, int, tuple[bool, bool, int], _Deltas]


@dataclass(slots=True)
class DecodeGraphs:
    """Replaces ``run_modules``; one thread at a time."""

    run_modules: RunPass
    _met: set[_Kind] = field(default_factory=set)
    _captured: dict[_Kind, CapturedPass] = field(default_factory=dict)  # not yet verified
    _verified: dict[_Kind, CapturedPass] = field(default_factory=dict)
    _is_off: bool = False

    @property
    def num_verified(self) -> int:
        """The number of kinds of passes that are replayed."""
        return len(self._verified)

    def __call__(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        logit_indices: torch.Tensor,
        metadata: PassMetadata,
    ) -> torch.Tensor:
        num_tokens = input_ids.shape[1]
        is_decode = metadata.attention.max_query_len == 1 and len(logit_indices) == num_tokens
        if self._is_off or not is_decode or num_tokens > _MAX_TOKENS:
            return self.run_modules(input_ids, position_ids, logit_indices, metadata)
        kind = (num_tokens, num_kernel_threads(), metadata.outside, _Deltas.of(metadata))
        graph = self._verified.get(kind)
        if graph is not None:
            return graph.replay(input_ids, position_ids, metadata)
        if self._may_capture(kind):
            return self._capture(kind, input_ids, position_ids, logit_indices, metadata)
        logits = self.run_modules(input_ids, position_ids, logit_indices, metadata)
        if kind in self._captured:
            self._verify(kind, logits, input_ids, position_ids, metadata)
        self._met.add(kind)
        return logits

    def _may_capture(self, kind: _Kind) -> bool:
        *size, deltas = kind
        if deltas is _Deltas.OTHER:
            # Such a pass cannot be computed twice for a check. Except for the deltas it equals one
            # that was checked.
            return any((*size, known) in self._verified for known in _Deltas)
        return kind in self._met and kind not in self._captured

    def _capture(
        self,
        kind: _Kind,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        logit_indices: torch.Tensor,
        metadata: PassMetadata,
    ) -> torch.Tensor:
        """Run the modules and record their computations."""
        logits, graph = capture_pass(
            lambda ids, positions: self.run_modules(ids, positions, logit_indices, metadata),
            input_ids,
            position_ids,
        )
        if isinstance(graph, str):
            self._turn_off(graph)
        elif kind[-1] is _Deltas.OTHER:
            self._verified[kind] = graph
        else:
            self._captured[kind] = graph
        return logits

    def _verify(
        self,
        kind: _Kind,
        expected: torch.Tensor,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        metadata: PassMetadata,
    ) -> None:
        """Compute the pass again from the graph: it writes the same keys and values."""
        graph = self._captured.pop(kind)
        replayed = graph.replay(input_ids, position_ids, metadata)
        if torch.equal(replayed.view(torch.uint8), expected.view(torch.uint8)):
            self._verified[kind] = graph
            _LOG.debug("decode graphs: passes of %d tokens are replayed", input_ids.shape[1])
            return
        self._turn_off(f"a replay of {input_ids.shape[1]} tokens gave other logits; please report this model")

    def _turn_off(self, reason: str) -> None:
        """Turn replays off permanently, with a warning, because the start announced them."""
        self._is_off = True
        self._captured.clear()
        self._verified.clear()
        _LOG.warning("decode graphs: off, and the model's modules run every step (%s)", reason)


_KERNELS = ("attention", "LoRA")
OFF, ONCE_VERIFIED = "off", "once verified"


def select_decode_graphs(name: str, backend_names: Mapping[str, str]) -> str:
    """Whether decode passes may be replayed; returns ``OFF`` or ``ONCE_VERIFIED``, for logs.

    Which passes can be replayed is known only when they are captured, while requests run.

    ``backend_names``: by part. All parts not computed by torch must be kernels that are called
    through the launcher.
    """
    others = [f"{what} {backend_names[what]}" for what in _KERNELS if backend_names[what] != "numba"]
    if name == "off":
        others = ["configured"]
    if others:
        _LOG.info("decode graphs: off (%s)", ", ".join(others))
        return OFF
    # A capture compiles these in addition to the kernels in use; at start no token waits for it.
    replay(0, 0)
    residual.compile_kernel()
    return ONCE_VERIFIED

"""Replays captured decode passes, instead of running the model's modules again.

A decode pass with the same number of rows repeats the same computation on other numbers. For a
small model on the CPU Python takes a quarter of the time; on a GPU it takes several times as long
as the device. A graph is captured when a kind of pass occurs for the second time, and replayed only
after it has given the logits of the modules, for inputs other than those of the capture.
"""

import logging
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple, Protocol, Self

import torch

from ..forward.batch import PassMetadata
from ..fused import residual
from .replay_kernel import replay

_LOG = logging.getLogger(__name__)


class PassInputs(NamedTuple):
    """The inputs of one pass of the model."""

    input_ids: torch.Tensor  # int64 [1, tokens]
    position_ids: torch.Tensor  # int64 [1, tokens]
    logit_indices: torch.Tensor  # int64, packed indices of the tokens that need logits
    metadata: PassMetadata


class RunPass(Protocol):
    """Computes one pass of the model."""

    def __call__(self, inputs: PassInputs) -> torch.Tensor:
        """Return the logits [1, len(logit_indices), vocabulary]; the next pass may change them."""


class DeltaSource(Enum):
    """Where the deltas of a pass come from."""

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


class Graph(Protocol):
    """A captured pass; the tensors that its methods return may change with the next pass."""

    def replay(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, metadata: PassMetadata
    ) -> torch.Tensor:
        """Compute the pass on other inputs of its kind; see ``RunPass``."""

    def compute(self, run_modules: RunPass, inputs: PassInputs) -> torch.Tensor:
        """Compute the same by the modules, with tensors of the shapes that the graph has."""


# What decides which graph a pass needs, and last where its deltas come from.
Kind = tuple[Hashable, DeltaSource]


class GraphDevice(Protocol):
    """Captures passes on a device."""

    def kind(self, num_tokens: int, metadata: PassMetadata) -> Kind | None:
        """The kind of a decode pass; None = it is not captured."""

    def capture(self, run_modules: RunPass, inputs: PassInputs) -> tuple[torch.Tensor, Graph | str | None]:
        """Run a pass once and capture it: its logits, and the graph.

        Without a graph the reason why no pass is replayed; None = only this kind is not.
        """

    def difference(self, replayed: torch.Tensor, expected: torch.Tensor) -> str | None:
        """How the logits of a replay differ from the modules', if they may not; else None."""


@dataclass(slots=True)
class DecodeGraphs:
    """Replaces ``run_modules``; one thread at a time."""

    run_modules: RunPass
    device: GraphDevice
    _met: set[Kind] = field(default_factory=set)
    _captured: dict[Kind, Graph] = field(default_factory=dict)  # not yet verified
    _verified: dict[Kind, Graph] = field(default_factory=dict)
    _is_off: bool = False

    @property
    def num_verified(self) -> int:
        """The number of kinds of passes that are replayed."""
        return len(self._verified)

    def __call__(self, inputs: PassInputs) -> torch.Tensor:
        metadata, num_tokens = inputs.metadata, inputs.input_ids.shape[1]
        is_decode = metadata.attention.max_query_len == 1 and len(inputs.logit_indices) == num_tokens
        kind = self.device.kind(num_tokens, metadata) if is_decode and not self._is_off else None
        if kind is None:
            return self.run_modules(inputs)
        graph = self._verified.get(kind)
        if graph is not None:
            return graph.replay(inputs.input_ids, inputs.position_ids, metadata)
        if self._may_capture(kind):
            return self._capture(kind, inputs)
        if kind in self._captured:
            return self._verify(kind, inputs)
        self._met.add(kind)
        return self.run_modules(inputs)

    def _may_capture(self, kind: Kind) -> bool:
        size, deltas = kind
        if deltas is DeltaSource.OTHER:
            # Such a pass cannot be computed twice for a check. Except for the deltas it equals one
            # that was checked.
            return any((size, known) in self._verified for known in DeltaSource)
        return kind in self._met and kind not in self._captured

    def _capture(self, kind: Kind, inputs: PassInputs) -> torch.Tensor:
        """Run the modules and record their computations."""
        logits, graph = self.device.capture(self.run_modules, inputs)
        if isinstance(graph, str):
            self._turn_off(graph)
        elif graph is not None and kind[-1] is DeltaSource.OTHER:
            self._verified[kind] = graph
        elif graph is not None:
            self._captured[kind] = graph
        return logits

    def _verify(self, kind: Kind, inputs: PassInputs) -> torch.Tensor:
        """Compute a pass from the graph, which reads the keys and values that it writes, and again."""
        graph, num_tokens = self._captured.pop(kind), inputs.input_ids.shape[1]
        replayed = graph.replay(inputs.input_ids, inputs.position_ids, inputs.metadata).clone()
        expected = graph.compute(self.run_modules, inputs)
        difference = self.device.difference(replayed, expected)
        if difference is None:
            self._verified[kind] = graph
            _LOG.debug("decode graphs: passes of %d tokens are replayed", num_tokens)
        else:
            self._turn_off(
                f"a replay of {num_tokens} tokens gave other logits{difference}; please report this model"
            )
        return expected

    def _turn_off(self, reason: str) -> None:
        """Turn replays off permanently, with a warning, because the start announced them."""
        self._is_off = True
        self._captured.clear()
        self._verified.clear()
        _LOG.warning("decode graphs: off, and the model's modules run every step (%s)", reason)


_KERNELS = ("attention", "LoRA")
OFF, ONCE_VERIFIED = "off", "once verified"


def select_decode_graphs(name: str, backend_names: Mapping[str, str], device_type: str) -> str:
    """Whether decode passes may be replayed; returns ``OFF`` or ``ONCE_VERIFIED``, for logs.

    Which passes can be replayed is known only when they are captured, while requests run.

    ``backend_names``: by part. All parts not computed by torch must be kernels that are called
    through the launcher, or that a stream of CUDA takes.
    """
    wanted = "triton" if device_type == "cuda" else "numba"
    others = [f"{what} {backend_names[what]}" for what in _KERNELS if backend_names[what] != wanted]
    if name == "off":
        others = ["configured"]
    if others:
        _LOG.info("decode graphs: off (%s)", ", ".join(others))
        return OFF
    if device_type == "cpu":
        # A capture compiles these in addition to the kernels in use; at start no token waits for it.
        replay(0, 0)
        residual.compile_kernel()
    return ONCE_VERIFIED

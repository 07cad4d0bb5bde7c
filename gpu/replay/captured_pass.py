"""A pass of a model as a list of computations, which can be repeated on other inputs.

Consecutive calls of compiled kernels are made in one compiled loop; operations of torch between
them are called one by one. No code of the model's modules runs.
"""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ..forward.batch import PassMetadata
from .decode_graphs import PassInputs, RunPass
from .replay_kernel import replay


class Part(Protocol):
    """One computation of a pass."""

    def run(self) -> None:
        """Compute it, from and to the memory of the capture."""


class KernelCalls:
    """Consecutive calls of kernels."""

    def __init__(self) -> None:
        self._calls = array("q")
        self._arguments: list[array[int]] = []  # kept alive for their addresses
        self.num_calls = 0

    def append(self, signature: int, function: int, arguments: bytes) -> None:
        """Add a call; ``arguments``: 8 bytes for each, see ``replay_kernel``."""
        words = array("q", arguments)
        self._arguments.append(words)
        self._calls.extend((signature, function, words.buffer_info()[0]))
        self.num_calls += 1

    def run(self) -> None:
        replay(self._calls.buffer_info()[0], self.num_calls)


@dataclass(frozen=True, slots=True)
class TorchOperation:
    """One operation of torch; its results are written to the memory of the captured ones."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    named: dict[str, Any]
    results: tuple[torch.Tensor, ...]  # () = it writes to its arguments

    def run(self) -> None:
        """Call it and copy its results."""
        returned = self.function(*self.arguments, **self.named)
        if not self.results:
            return
        values = (returned,) if isinstance(returned, torch.Tensor) else returned
        for result, value in zip(self.results, values, strict=True):
            result.copy_(value)


@dataclass(frozen=True, slots=True)
class Callback:
    """Python code that differs from pass to pass."""

    run: Callable[[], None]


@dataclass(frozen=True, slots=True, eq=False)
class CapturedPass:
    """A captured pass, with the memory that it reads and writes."""

    input_ids: torch.Tensor  # int64 [1, tokens]
    position_ids: torch.Tensor  # int64 [1, tokens]
    logits: torch.Tensor  # [1, logits, vocabulary]
    parts: Sequence[Part]
    preparations: Sequence[Callable[[PassMetadata], None]]
    kept: Sequence[object]  # memory that is accessed only by address

    def replay(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, metadata: PassMetadata
    ) -> torch.Tensor:
        """Compute the pass on other inputs of the same shapes; in inference mode.

        Returns ``logits``, which the next replay overwrites. Raises the errors of operations.
        """
        self.input_ids.copy_(input_ids)
        self.position_ids.copy_(position_ids)
        for prepare in self.preparations:
            prepare(metadata)
        for part in self.parts:
            part.run()
        return self.logits

    def compute(self, run_modules: RunPass, inputs: PassInputs) -> torch.Tensor:
        """See ``Graph``."""
        return run_modules(inputs)

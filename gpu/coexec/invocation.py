"""One job of a CPU worker as the device sees it: where x goes, where y comes from, which words.

Plain data. The descriptor of the job has been published before; the device only copies, signals,
waits and adds.
"""

from dataclasses import dataclass

import torch

from ..device.base import Word


@dataclass(frozen=True, slots=True)
class Invocation:
    """A slice of packed tokens of one input group, computed by one worker."""

    worker: int
    sequence: int  # of the job, in the worker's mailbox
    generation: int  # of the worker that it was published for
    start: int  # first packed token
    end: int  # one past the last
    x: torch.Tensor  # [end - start, in_features], in registered host memory
    y: torch.Tensor  # [end - start, padded columns of all targets], in registered host memory
    columns: tuple[tuple[int, int], ...]  # first column and width in y, one per target of the group
    ready: Word  # reaches ``sequence`` when x is there
    done: Word  # reaches it when y is

"""One job of the CPU workers as the device sees it: addresses of x and y, and the team's words.

Plain data. The job's descriptor has been published before; the device only copies, signals, waits
and adds.
"""

import functools
from dataclasses import dataclass
from typing import Protocol

import torch

from ...shm.region import Region
from ..device.base import Word
from ..lora.adapter_layout import GroupKey


@dataclass(frozen=True, slots=True, eq=False)
class JobShape:
    """Common properties of all jobs on regions of one layout; compared by identity."""

    region: Region
    in_features: int
    y_columns: int  # padded, of all targets together
    # By target of the group: first column and width in y; width 0 = nothing is added.
    columns: tuple[tuple[int, int], ...]


@functools.lru_cache(maxsize=4096)
def job_shape(region: Region) -> JobShape:
    """The shape of the region's jobs: one object for equal regions while they are in use."""
    columns, first = [], 0
    for target in region.targets:
        columns.append((first, target.padded_columns if target.rank else 0))
        first += target.padded_columns
    return JobShape(region, region.in_features, first, tuple(columns))


class RowViews(Protocol):
    """The device's view of the shared rows."""

    @property
    def address(self) -> int:
        """The host address that offsets are relative to."""

    def rows(self, offset: int, num_rows: int, num_columns: int) -> torch.Tensor:
        """Contiguous bf16 rows."""


@dataclass(slots=True, eq=False)
class Invocation:
    """Packed tokens of one input group and one adapter, computed by a team."""

    key: GroupKey
    sequence: int  # of the job
    start: int  # first packed token
    end: int  # one past the last
    shape: JobShape
    memory: RowViews
    x_offset: int
    y_offset: int
    ready: Word  # reaches ``sequence`` when x is available
    done: Word  # reaches ``sequence`` when y is available

    @property
    def x(self) -> torch.Tensor:
        """[end - start, in_features], in registered host memory."""
        return self.memory.rows(self.x_offset, self.end - self.start, self.shape.in_features)

    @property
    def y(self) -> torch.Tensor:
        """[end - start, padded columns of all targets], in registered host memory."""
        return self.memory.rows(self.y_offset, self.end - self.start, self.shape.y_columns)

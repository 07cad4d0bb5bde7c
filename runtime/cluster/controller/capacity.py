"""An engine's operating capacity for adapters of each rank, found by simulating its profile.

The search (``simulated_capacity``) takes minutes. It runs in a process of its own at idle priority,
so that serving is not slowed. Its result is kept in the state directory under the task's digest.
"""

import asyncio
import hashlib
from pathlib import Path

import msgspec

from ...errors import CorunError
from ..process import spawn
from ..wire import EngineProfile

_FINDER = "corun.runtime.cluster.controller.simulated_capacity"  # simulating takes long to import
_LOOK_EVERY_S = 0.1


class CapacityTask(msgspec.Struct, frozen=True):
    """A search for the operating capacity of one engine."""

    profile: EngineProfile
    total_kv_tokens: int
    ranks: tuple[int, ...]  # in addition to common ranks
    slo_ttft_s: float
    folder: str  # of kept simulated runs

    @property
    def path(self) -> Path:
        """The file in which the result is kept."""
        asked = msgspec.to_builtins(msgspec.structs.replace(self, folder=""))
        if not self.profile.is_measured:
            del asked["profile"]["machine"]  # learned while serving, so it differs each time
        digest = hashlib.sha256(msgspec.json.encode(asked)).hexdigest()
        return Path(self.folder) / f"{digest[:16]}.points"


class FoundCapacity(msgspec.Struct, frozen=True):
    """Tokens/s by rank, of prompts and outputs together."""

    tokens_per_s: dict[int, float]


async def capacity_of(task: CapacityTask) -> dict[int, float]:
    """Return tokens/s by rank, searched for once. Raises ``CorunError`` if the search fails."""
    if (found := _read(task)) is not None:
        return found
    process = spawn(_FINDER, settings=task)
    try:
        while process.poll() is None:
            await asyncio.sleep(_LOOK_EVERY_S)
    finally:
        process.kill()
        process.wait()
    found = _read(task)
    if found is None:
        raise CorunError(
            f"found no operating capacity: the search ended with status {process.returncode}"
        )
    return found


def _read(task: CapacityTask) -> dict[int, float] | None:
    try:
        return msgspec.json.decode(task.path.read_bytes(), type=FoundCapacity).tokens_per_s
    except (OSError, msgspec.DecodeError):
        return None

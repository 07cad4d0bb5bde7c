"""What an engine bears of each rank, found by simulating it as its profile says.

In a process of its own that runs when nobody else does, so that serving does not miss its minutes
(``simulated_points``). What it has found lies in the state directory, by the digest of what was
asked.
"""

import asyncio
import hashlib
from pathlib import Path

import msgspec

from ...errors import CorunError
from ..process import spawn
from ..wire import EngineProfile

_FINDER = "corun.runtime.cluster.controller.simulated_points"  # simulating takes long to import
_LOOK_EVERY_S = 0.1


class PointsTask(msgspec.Struct, frozen=True):
    """Which points are wanted."""

    profile: EngineProfile
    total_kv_tokens: int
    ranks: tuple[int, ...]  # beside those that adapters often have
    slo_ttft_s: float
    folder: str  # where simulated runs are kept

    @property
    def path(self) -> Path:
        """Where the answer is kept."""
        asked = msgspec.to_builtins(msgspec.structs.replace(self, folder=""))
        if not self.profile.is_measured:
            del asked["profile"]["machine"]  # it is learned, and so another one each time
        digest = hashlib.sha256(msgspec.json.encode(asked)).hexdigest()
        return Path(self.folder) / f"{digest[:16]}.points"


class FoundPoints(msgspec.Struct, frozen=True):
    """Tokens/s by rank, of prompts and outputs together."""

    tokens_per_s: dict[int, float]


async def points_of(task: PointsTask) -> dict[int, float]:
    """Tokens/s by rank, found once. Raises ``CorunError`` if there are none."""
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
        raise CorunError(f"no operating points were found: status {process.returncode}")
    return found


def _read(task: PointsTask) -> dict[int, float] | None:
    try:
        return msgspec.json.decode(task.path.read_bytes(), type=FoundPoints).tokens_per_s
    except (OSError, msgspec.DecodeError):
        return None

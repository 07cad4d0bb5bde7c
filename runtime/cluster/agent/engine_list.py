"""The list of a machine's engines, in a file.

After a crash the agent's next process restores the engines that ran last, not those of the first
start. A start of the whole cluster discards the list.
"""

import logging
from pathlib import Path

import msgspec

from ...whole_file import write_whole

_logger = logging.getLogger(__name__)


class _EngineList(msgspec.Struct, frozen=True):
    run_id: str
    num_ids: int
    engine_ids: list[str]


class EngineListFile:
    """The list of one run of the cluster, ``run_id``; the list of another run is ignored."""

    def __init__(self, path: Path, run_id: str) -> None:
        self._path = path
        self._run_id = run_id

    def read(self) -> tuple[int, list[str]] | None:
        """Return the number of ids used in this run, and the engine ids; None without a list."""
        try:
            saved = msgspec.json.decode(self._path.read_bytes(), type=_EngineList)
        except (OSError, msgspec.DecodeError):
            return None
        return (saved.num_ids, saved.engine_ids) if saved.run_id == self._run_id else None

    def write(self, num_ids: int, engine_ids: list[str]) -> None:
        """Write the list. A failure is logged only: engines go on without it."""
        try:
            write_whole(self._path, msgspec.json.encode(_EngineList(self._run_id, num_ids, engine_ids)))
        except OSError as error:
            _logger.warning("cannot write engine list to %s: %s", self._path, error)

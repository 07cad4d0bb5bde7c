"""Which engines a machine is to have, written down.

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
    """Of one start of the cluster, ``run_id``; those of others do not count."""

    def __init__(self, path: Path, run_id: str) -> None:
        self._path = path
        self._run_id = run_id

    def read(self) -> tuple[int, list[str]] | None:
        """How many ids were given in this run, and the engines that are wanted; None = a start."""
        try:
            saved = msgspec.json.decode(self._path.read_bytes(), type=_EngineList)
        except (OSError, msgspec.DecodeError):
            return None
        return (saved.num_ids, saved.engine_ids) if saved.run_id == self._run_id else None

    def write(self, num_ids: int, engine_ids: list[str]) -> None:
        """Note both. A disk that is full costs no engine, only this."""
        try:
            write_whole(
                self._path, msgspec.json.encode(_EngineList(self._run_id, num_ids, engine_ids))
            )
        except OSError as error:
            _logger.warning("which engines there are cannot be noted in %s: %s", self._path, error)

"""Watches ``--lora-dir`` in a thread, and tells what has come, changed and gone there."""

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from ...cpu_workers.affinity import place_thread
from ..errors import AdapterError, ConfigError
from .checkpoint import WEIGHTS_NAME, is_complete
from .dir_changes import DirChanges, DirState, FoundAdapter
from .names import check_adapter_name
from .peft_config import CONFIG_NAME
from .sources import discover

_LOG = logging.getLogger(__name__)

_LOOK_MS = 500  # while something has not settled, and to notice the end
_POLL_S = 5.0  # where the system tells of no changes


def look(directory: Path) -> dict[str, FoundAdapter]:
    """Return the adapters below ``directory`` by name, as far as they can be seen now."""
    found = {}
    try:
        entries = discover(directory)
    except ConfigError:  # it is gone, and may come back
        return {}
    for name, path in entries:
        try:
            check_adapter_name(name)
            stats = [(path / file).stat() for file in (CONFIG_NAME, WEIGHTS_NAME)]
        except (OSError, AdapterError):
            continue  # its weights have not come yet
        stamps = tuple((one.st_ino, one.st_size, one.st_mtime_ns) for one in stats)
        found[name] = FoundAdapter(str(path), stamps, is_complete(path))
    return found


class LoraDirWatch:
    """Owns the thread."""

    def __init__(
        self, directory: Path, known: Mapping[str, FoundAdapter], notify: Callable[[], None],
        cpus: tuple[int, ...] = (),
    ) -> None:  # fmt: skip
        """Start it.

        Args:
            directory: To watch.
            known: What was there and is registered.
            notify: Called by the thread when there is something to take.
            cpus: Where the thread runs; () = where the caller does.
        """
        self._cpus = cpus
        self._directory = directory
        self._state = DirState(dict(known))
        self._notify = notify
        self._changes: queue.SimpleQueue[DirChanges] = queue.SimpleQueue()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="corun-lora-dir", daemon=True)
        self._thread.start()

    def take(self) -> DirChanges | None:
        """Return what was seen next, if anything was."""
        try:
            return self._changes.get_nowait()
        except queue.Empty:
            return None

    def close(self) -> None:
        """End the thread. Idempotent."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            place_thread(self._cpus)
            self._watch()
        except Exception as error:  # whatever the system has against it
            _LOG.warning(
                "--lora-dir %s cannot be watched (%s: %s): it is looked at every %g s",
                self._directory, type(error).__name__, error, _POLL_S,
            )  # fmt: skip
            while not self._stop.wait(_POLL_S):
                self._look()

    def _watch(self) -> None:
        from watchfiles import watch

        self._look()  # what has changed since it was registered
        for changes in watch(
            self._directory, stop_event=self._stop, rust_timeout=_LOOK_MS, yield_on_timeout=True,
            raise_interrupt=False,
        ):  # fmt: skip
            if changes or not self._state.is_settled:
                self._look()

    def _look(self) -> None:
        changes = self._state.see(look(self._directory), time.monotonic())
        if changes.changed or changes.removed:
            self._changes.put(changes)
            self._notify()

"""Watches ``--lora-dir`` in a thread, and reports adapters added, changed and removed."""

import logging
import queue
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path

from ...cpu_workers.affinity import place_thread
from .checkpoint import WEIGHTS_NAME, is_complete
from .convention_files import stamps_of
from .conventions import CONVENTION_NAMES
from .dir_changes import DirChanges, DirState, FoundAdapter, is_same
from .peft_config import CONFIG_NAME
from .sources import LoraDirEntries, discover, log_entries, why_unknown

_LOG = logging.getLogger(__name__)

# Its log line for each batch of changes would appear for every file written.
logging.getLogger("watchfiles").setLevel(logging.WARNING)

_LOOK_MS = 500  # while a change is pending, and to notice the end
_POLL_S = 5.0  # if the system does not report changes


class LoraDir:
    """Scans one directory; logs entries that cannot be read or served, once."""

    def __init__(self, path: Path, base_names: Collection[str] = ()) -> None:
        """``base_names``: names that no adapter may have."""
        self.path = path
        self.entries = LoraDirEntries()  # at the last scan
        self._base_names = base_names

    def look(self, known: Mapping[str, FoundAdapter] | None = None) -> dict[str, FoundAdapter]:
        """Return the adapters by name; ``entries`` has those that cannot be read.

        ``known``: adapters that are not examined again if they are the same.
        """
        found = {}
        entries = discover(self.path, self._base_names)
        for name, path in entries.adapters.items():
            try:
                stamps = stamps_of(path, (CONFIG_NAME, WEIGHTS_NAME, *CONVENTION_NAMES))
            except OSError as error:
                entries.unreadable[name] = str(why_unknown(error))
                continue
            if None in stamps[:2]:
                continue  # its weights do not exist yet
            adapter = FoundAdapter(str(path), stamps)
            if not is_same((known or {}).get(name), adapter):
                adapter = replace(adapter, is_complete=is_complete(path))
            found[name] = adapter
        self.entries = entries
        return found


class LoraDirWatch:
    """Owns the thread."""

    def __init__(
        self, lora_dir: LoraDir, known: Mapping[str, FoundAdapter], notify: Callable[[], None],
        cpus: tuple[int, ...] = (),
    ) -> None:  # fmt: skip
        """Start it.

        Args:
            lora_dir: To watch.
            known: The adapters that are registered.
            notify: Called by the thread when ``take`` has something to return.
            cpus: The thread's cores; () = the caller's.
        """
        self._cpus = cpus
        self._dir = lora_dir
        self._directory = lora_dir.path
        self._state = DirState(dict(known))
        self._looked_s = time.monotonic()
        self._notify = notify
        self._changes: queue.SimpleQueue[DirChanges] = queue.SimpleQueue()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="corun-lora-dir", daemon=True)
        self._thread.start()

    def take(self) -> DirChanges | None:
        """Return the next changes, or None."""
        try:
            return self._changes.get_nowait()
        except queue.Empty:
            return None

    @property
    def num_unreadable(self) -> int:
        """Number of entries that cannot be read now; the directory itself counts as one."""
        return len(self._dir.entries.unreadable)

    def close(self) -> None:
        """End the thread. Idempotent."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            place_thread(self._cpus)
            self._watch()
        except Exception as error:  # for any reason of the system
            _LOG.warning(
                "--lora-dir %s cannot be watched (%s: %s); scanning it every %g s instead",
                self._directory, type(error).__name__, error, _POLL_S,
            )  # fmt: skip
            while not self._stop.wait(_POLL_S):
                self._look()

    def _watch(self) -> None:
        from watchfiles import watch

        while not self._stop.is_set():
            watched = _identity(self._directory)
            if watched is None:
                self._look()
                self._stop.wait(_LOOK_MS / 1000)
                continue
            is_first = True  # changes before the watch began are not reported
            for changes in watch(
                self._directory, stop_event=self._stop, rust_timeout=_LOOK_MS,
                yield_on_timeout=True, raise_interrupt=False, ignore_permission_denied=True,
            ):  # fmt: skip
                if is_first or changes or self._is_due():
                    self._look()
                is_first = False
                if _identity(self._directory) != watched:  # the watch is on the old directory
                    break

    def _is_due(self) -> bool:
        """Whether to scan although the system reports no changes."""
        if self.num_unreadable and time.monotonic() - self._looked_s >= _POLL_S:
            return True
        return not self._state.is_settled

    def _look(self) -> None:
        before = self._dir.entries
        found = self._dir.look(self._state.known)
        now, self._looked_s = self._dir.entries, time.monotonic()
        log_entries(self._directory, before, now)
        changes = self._state.see(found, self._looked_s, now.unreadable, is_missing=now.is_missing)
        if changes.changed or changes.removed:
            self._changes.put(changes)
        elif len(before.unreadable) == len(now.unreadable):
            return
        self._notify()


def _identity(directory: Path) -> tuple[int, int] | None:
    """Return the identity of the directory at this path; None if it cannot be read."""
    try:
        status = directory.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino

"""Watches ``--lora-dir`` in a thread, and reports adapters added, changed and removed."""

import logging
import queue
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from ...cpu_workers.affinity import place_thread
from ..file_calls import FILES
from .checkpoint import WEIGHTS_NAME, is_complete
from .convention_files import stamps_of
from .conventions import CONVENTION_NAMES
from .dir_changes import DirChanges, DirState, FoundAdapter, WatchState, is_same
from .folder_files import OWN_FILES, AdapterRoots
from .peft_config import CONFIG_NAME
from .sources import LoraDirEntries, discover, log_entries

_LOG = logging.getLogger(__name__)

# Its log line for each batch of changes would appear for every file written.
logging.getLogger("watchfiles").setLevel(logging.WARNING)

_LOOK_MS = 500  # while a change is pending, and to notice the end
_POLL_S = 5.0  # if the system does not report changes
_SILENT_S = 30.0  # without a look; after that the log and metrics say so
_STOP_S = 10.0  # for the thread to end


class LoraDir:
    """Scans one directory; logs entries that cannot be read or served, once."""

    def __init__(self, path: Path, base_names: Collection[str] = (), roots: AdapterRoots = OWN_FILES) -> None:
        """``base_names``: names that no adapter may have. ``roots``: where links may lead."""
        self.path = path
        self.entries = LoraDirEntries()  # at the last scan
        self._base_names = base_names
        self._roots = roots

    def look(self, known: Mapping[str, FoundAdapter] | None = None) -> dict[str, FoundAdapter]:
        """Return the adapters by name; ``entries`` has those that cannot be read.

        ``known``: adapters that are not examined again if they are the same.
        """

        def examine(name: str, path: Path) -> FoundAdapter | None:
            stamps = stamps_of(path, (CONFIG_NAME, WEIGHTS_NAME, *CONVENTION_NAMES))
            if None in stamps[:2]:
                return None  # its weights do not exist yet
            adapter = FoundAdapter(str(path), stamps)
            if is_same((known or {}).get(name), adapter):
                return adapter
            is_whole = is_complete(path, self._roots)
            return None if is_whole is None else replace(adapter, is_complete=is_whole)

        self.entries = discover(self.path, self._base_names, examine)
        return dict(self.entries.examined)


class LoraDirWatch:
    """Owns the thread."""

    def __init__(
        self,
        lora_dir: LoraDir,
        known: Mapping[str, FoundAdapter],
        notify: Callable[[], None],
        cpus: tuple[int, ...] = (),
    ) -> None:
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
        self._looked_s = self._seen_s = time.monotonic()
        self._is_silent = False
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
    def state(self) -> WatchState:
        """The state of the directory now."""
        unseen_s = time.monotonic() - self._seen_s
        num_unreadable = len(self._dir.entries.unreadable)
        return WatchState(num_unreadable, int(unseen_s) if unseen_s >= _SILENT_S else 0)

    def close(self) -> None:
        """End the thread. Idempotent."""
        self._stop.set()
        self._thread.join(_STOP_S)

    def _run(self) -> None:
        try:
            place_thread(self._cpus)
            self._watch()
        except Exception as error:  # for any reason of the system
            _LOG.warning(
                "--lora-dir %s cannot be watched (%s: %s); scanning it every %g s instead",
                self._directory,
                type(error).__name__,
                error,
                _POLL_S,
            )
            while not self._stop.wait(_POLL_S):
                try:
                    self._look()
                except Exception:  # deleted adapters would be served on without the thread
                    _LOG.exception("scanning --lora-dir %s failed; trying again", self._directory)
                self._note_silence()

    def _watch(self) -> None:
        from watchfiles import watch

        while not self._stop.is_set():
            watched = _identity(self._directory)
            if watched is None:
                self._look()
                self._note_silence()
                self._stop.wait(_LOOK_MS / 1000)
                continue
            is_first = True  # changes before the watch began are not reported
            for changes in self._in_time(
                watch(
                    self._directory,
                    stop_event=self._stop,
                    rust_timeout=_LOOK_MS,
                    yield_on_timeout=True,
                    raise_interrupt=False,
                    ignore_permission_denied=True,
                )
            ):
                if is_first or changes or self._is_due():
                    self._look()
                else:
                    self._seen_s = time.monotonic()
                self._note_silence()
                is_first = False
                if _identity(self._directory) != watched:  # the watch is on the old directory
                    break

    def _in_time(self, batches: Iterator[object]) -> Iterator[object]:
        """Yield ``batches``. Raises ``SilentError`` if the next one does not come in time."""
        end, what = object(), f"the watch of {self._directory}"
        while (batch := FILES.call(lambda _: next(batches, end), what, _SILENT_S)) is not end:
            yield batch

    def _note_silence(self) -> None:
        """Log once that the directory cannot be looked at, and once that it can."""
        is_silent = self.state.unseen_s > 0
        if is_silent == self._is_silent:
            return
        self._is_silent = is_silent
        if is_silent:
            _LOG.warning(
                "--lora-dir %s has not been looked at for %g s: adapters that are added, changed "
                "or removed there are not noticed until it can be read; check its file system",
                self._directory,
                _SILENT_S,
            )
        else:
            _LOG.info("--lora-dir %s is looked at again", self._directory)
        self._notify()

    def _is_due(self) -> bool:
        """Whether to scan although the system reports no changes."""
        if self._dir.entries.unreadable and time.monotonic() - self._looked_s >= _POLL_S:
            return True
        return not self._state.is_settled

    def _look(self) -> None:
        before = self._dir.entries
        found = self._dir.look(self._state.known)
        now, self._looked_s = self._dir.entries, time.monotonic()
        if "" not in now.unreadable:
            self._seen_s = self._looked_s
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
        status = FILES.call(lambda _: directory.stat(), str(directory))
    except OSError:
        return None
    return status.st_dev, status.st_ino

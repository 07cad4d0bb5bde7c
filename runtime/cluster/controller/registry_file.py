"""Creates, locks and opens the registry's file, and refuses a damaged one."""

import fcntl
import logging
import os
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import IO

from ...errors import ConfigError
from ...whole_file import sync_directory

_logger = logging.getLogger(__name__)

_APPLICATION_ID = 0x636F7275  # in SQLite's header: a file of corun
_SCHEMA_VERSION = 2
_SCHEMA = """
CREATE TABLE counters (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE adapters (
    name TEXT PRIMARY KEY, revision INTEGER NOT NULL, digest TEXT NOT NULL, rank INTEGER NOT NULL,
    num_bytes INTEGER NOT NULL, source TEXT NOT NULL, state TEXT NOT NULL, reason TEXT,
    pinned INTEGER NOT NULL, base_fingerprint TEXT NOT NULL
) WITHOUT ROWID;
CREATE TABLE changes (
    name TEXT PRIMARY KEY, revision INTEGER NOT NULL, digest TEXT NOT NULL
) WITHOUT ROWID;
CREATE TABLE unloads (name TEXT PRIMARY KEY, revision INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE copies (
    digest TEXT NOT NULL, agent_id TEXT NOT NULL, is_kept INTEGER NOT NULL,
    used_unix_s REAL NOT NULL, PRIMARY KEY (digest, agent_id)
) WITHOUT ROWID;
CREATE TABLE demand (
    minute INTEGER NOT NULL, name TEXT NOT NULL, prompt_tokens INTEGER NOT NULL,
    output_tokens INTEGER NOT NULL, PRIMARY KEY (minute, name)
) WITHOUT ROWID;
CREATE TABLE placements (
    step INTEGER PRIMARY KEY, at_unix_s REAL NOT NULL, policy TEXT NOT NULL, shares TEXT NOT NULL,
    moved_bytes INTEGER NOT NULL
);
CREATE TABLE engines (url TEXT PRIMARY KEY, card TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE members (
    engine_id TEXT PRIMARY KEY, card TEXT NOT NULL, pid INTEGER NOT NULL, profile TEXT NOT NULL
) WITHOUT ROWID;
CREATE TABLE agents (agent_id TEXT PRIMARY KEY, url TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE run (run_id TEXT NOT NULL);
"""
# Added later; older files get it when they are opened.
_MORE = "CREATE TABLE IF NOT EXISTS wishes (wish TEXT NOT NULL)"
_NAME, _LOCK_NAME = "registry.sqlite", "controller.lock"


def opened(directory: Path) -> tuple[IO[str], sqlite3.Connection]:
    """Return the lock of a state directory (closing releases it) and the open database.

    Raises ``ConfigError`` if it is held by another controller, foreign or corrupt.
    """
    lock = _locked(directory)
    path = directory / _NAME
    try:
        if not path.exists():
            _create(path)
        elif not path.stat().st_size:
            _logger.warning("--state-dir: %s is empty, as after a power cut: load its adapters again", path)
            _create(path)
        return lock, _opened(path)
    except BaseException:
        lock.close()
        raise


def _locked(directory: Path) -> IO[str]:
    """Lock the directory; the kernel releases the lock when the process ends."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = (directory / _LOCK_NAME).open("a+", encoding="ascii")
    except OSError as error:
        raise ConfigError(f"--state-dir {directory}: {error.strerror}") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.seek(0)
        holder = lock.read(20).strip() or "unknown"
        lock.close()
        raise ConfigError(
            f"--state-dir {directory} is held by another controller (process {holder}); "
            "give each cluster its own --state-dir"
        ) from None
    lock.truncate(0)
    lock.write(str(os.getpid()))
    lock.flush()
    return lock


def _create(path: Path) -> None:
    """Create an empty file atomically."""
    part = path.with_suffix(".part")
    log = path.with_name(f"{path.name}-wal")  # of an earlier file: it must not apply to this one
    for left in (part, log):
        left.unlink(missing_ok=True)
    try:
        with closing(sqlite3.connect(part, isolation_level=None)) as db:
            db.executescript(_SCHEMA)
            db.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
            db.execute(f"PRAGMA user_version = {_SCHEMA_VERSION}")
        part.rename(path)
        sync_directory(path.parent)
    except (sqlite3.Error, OSError) as error:
        raise ConfigError(f"--state-dir: cannot create {path}: {error}") from None


def _opened(path: Path) -> sqlite3.Connection:
    what = f"--state-dir: {path}"
    db = None
    try:
        db = sqlite3.connect(path, isolation_level=None, check_same_thread=True)
        application_id = db.execute("PRAGMA application_id").fetchone()[0]
        version = db.execute("PRAGMA user_version").fetchone()[0]
        if application_id != _APPLICATION_ID:
            raise ConfigError(
                f"{what} is not the registry of a cluster; move it away or give another --state-dir"
            )
        if version != _SCHEMA_VERSION:
            raise ConfigError(
                f"{what} is of version {version}, but this corun reads version {_SCHEMA_VERSION}"
            )
        found = db.execute("PRAGMA quick_check(1)").fetchone()[0]
        if found != "ok":
            raise sqlite3.DatabaseError(found)
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = FULL")  # a revision must not be reused after a power failure
        db.execute(_MORE)
    except (sqlite3.Error, OSError) as error:
        if db is not None:
            db.close()
        text = " ".join(str(error).split())
        raise ConfigError(
            f"{what} is damaged ({text}); restore a copy of it, or move it away to start without"
        ) from None
    except ConfigError:
        if db is not None:
            db.close()
        raise
    return db

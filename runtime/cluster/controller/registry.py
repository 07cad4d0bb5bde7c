"""The persistent state of a cluster in one SQLite file: adapters, copies, demand, placements.

Every method is one transaction, so a crash leaves the state between two calls. One thread of one
process owns a state directory. Times are seconds since the epoch, which hold over restarts.
"""

import fcntl
import logging
import os
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import IO, Any

import msgspec

from ...errors import ConfigError, ResourceError
from ...whole_file import sync_directory
from ..policy.reports import ServerId, Shares
from ..wire import AdapterEntry, EngineCard, EngineProfile

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


_KEPT_S = 24 * 3600.0  # of demand and placements
_REVISION, _START = "revision", "start"


class StoredCopy(msgspec.Struct, frozen=True):
    """A copy of an adapter's files, as an agent last reported it."""

    digest: str
    agent_id: str
    is_kept: bool  # ordered by the controller and confirmed by the agent
    used_unix_s: float


class StoredMember(msgspec.Struct, frozen=True):
    """An engine that gets requests."""

    card: EngineCard
    pid: int  # 0 = it has no agent
    profile: EngineProfile


class Registry:
    """The open file. Raises ``ConfigError`` if it is locked, foreign or corrupt."""

    def __init__(self, directory: Path, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock, self._db = opened(directory)
        with self._change() as db:
            self.start = _next(db, _START)  # the number of controller starts so far

    def close(self) -> None:
        """Close the file and release the directory. Idempotent."""
        self._db.close()
        self._lock.close()

    # Adapters.

    def adapters(self) -> list[AdapterEntry]:
        return [_entry(row) for row in self._db.execute("SELECT * FROM adapters ORDER BY name")]

    def adapter(self, name: str) -> AdapterEntry | None:
        row = self._db.execute("SELECT * FROM adapters WHERE name = ?", (name,)).fetchone()
        return None if row is None else _entry(row)

    def base_fingerprints(self) -> dict[str, str]:
        """Return the fingerprint of each adapter's base model, by name."""
        return dict(self._db.execute("SELECT name, base_fingerprint FROM adapters"))

    def begin_change(self, name: str, digest: str) -> int:
        """Store that a change of a name begins; return its revision.

        Until ``end_change`` or ``undo_change`` an engine may have the content, unknown to gateways.
        """
        with self._change() as db:
            revision = _next(db, _REVISION)
            db.execute("REPLACE INTO changes VALUES (?, ?, ?)", (name, revision, digest))
        return revision

    def end_change(self, entry: AdapterEntry, base_fingerprint: str) -> None:
        """Complete a change: the name has the new content."""
        with self._change() as db:
            _put(db, entry, base_fingerprint)
            db.execute("DELETE FROM changes WHERE name = ?", (entry.name,))
            db.execute("DELETE FROM unloads WHERE name = ?", (entry.name,))

    def undo_change(self, name: str) -> AdapterEntry | None:
        """Undo a change; return the former entry, at a new revision.

        None: there was none. The name is unloaded, also at engines that have it (``unloads``).
        """
        with self._change() as db:
            revision = _next(db, _REVISION)
            db.execute("DELETE FROM changes WHERE name = ?", (name,))
            db.execute("UPDATE adapters SET revision = ? WHERE name = ?", (revision, name))
            entry = self.adapter(name)
            if entry is None:
                db.execute("REPLACE INTO unloads VALUES (?, ?)", (name, revision))
        return entry

    def open_changes(self) -> dict[str, str]:
        """Return unfinished changes: digests by name."""
        return dict(self._db.execute("SELECT name, digest FROM changes ORDER BY name"))

    def set_entry(self, entry: AdapterEntry) -> None:
        """Update an adapter's pin, source or state, which are not content."""
        with self._change() as db:
            db.execute(
                "UPDATE adapters SET source = ?, state = ?, reason = ?, pinned = ? WHERE name = ?",
                (entry.source, entry.state, entry.reason, entry.pinned, entry.name),
            )

    def unload(self, name: str) -> int:
        """Remove a name; return the revision of the removal."""
        with self._change() as db:
            revision = _next(db, _REVISION)
            db.execute("DELETE FROM adapters WHERE name = ?", (name,))
            db.execute("REPLACE INTO unloads VALUES (?, ?)", (name, revision))
        return revision

    def unloads(self) -> dict[str, int]:
        """Return removed names that engines may still serve, and the revisions of removal."""
        return dict(self._db.execute("SELECT name, revision FROM unloads ORDER BY name"))

    def unloaded(self, name: str, revision: int) -> None:
        """Record that no engine serves a removed name any more."""
        with self._change() as db:
            db.execute("DELETE FROM unloads WHERE name = ? AND revision = ?", (name, revision))

    # Copies.

    def copies(self) -> list[StoredCopy]:
        rows = self._db.execute("SELECT digest, agent_id, is_kept, used_unix_s FROM copies")
        return [StoredCopy(one[0], one[1], bool(one[2]), one[3]) for one in rows]

    def set_copies(self, agent_id: str, copies: Iterable[StoredCopy]) -> None:
        with self._change() as db:
            db.execute("DELETE FROM copies WHERE agent_id = ?", (agent_id,))
            db.executemany(
                "INSERT INTO copies VALUES (?, ?, ?, ?)",
                [(one.digest, one.agent_id, one.is_kept, one.used_unix_s) for one in copies],
            )

    # Demand and placements.

    def add_demand(self, tokens: Mapping[str, tuple[int, int]]) -> None:
        """Add tokens of prompts and outputs to the current minute, by adapter."""
        minute = int(self._clock() // 60)
        with self._change() as db:
            db.executemany(
                "INSERT INTO demand VALUES (?, ?, ?, ?) ON CONFLICT DO UPDATE SET "
                "prompt_tokens = prompt_tokens + excluded.prompt_tokens, "
                "output_tokens = output_tokens + excluded.output_tokens",
                [(minute, name, prompt, output) for name, (prompt, output) in tokens.items()],
            )
            db.execute("DELETE FROM demand WHERE minute < ?", (minute - _KEPT_S // 60,))

    def demand(self, since_unix_s: float) -> dict[int, dict[str, tuple[int, int]]]:
        """Return tokens of prompts and outputs by minute since the epoch, and by adapter."""
        found: dict[int, dict[str, tuple[int, int]]] = {}
        rows = self._db.execute(
            "SELECT * FROM demand WHERE minute >= ? ORDER BY minute", (int(since_unix_s // 60),)
        )
        for minute, name, prompt, output in rows:
            found.setdefault(minute, {})[name] = (prompt, output)
        return found

    def add_placement(self, policy: str, shares: Shares, moved_bytes: int) -> None:
        now_s = self._clock()
        with self._change() as db:
            db.execute(
                "INSERT INTO placements (at_unix_s, policy, shares, moved_bytes) VALUES (?, ?, ?, ?)",
                (now_s, policy, msgspec.json.encode(shares).decode(), moved_bytes),
            )
            db.execute("DELETE FROM placements WHERE at_unix_s < ?", (now_s - _KEPT_S,))

    def last_shares(self) -> Shares:
        """Return the shares of the last step, or none."""
        row = self._db.execute("SELECT shares FROM placements ORDER BY step DESC LIMIT 1").fetchone()
        if row is None:
            return {}
        return msgspec.json.decode(row[0], type=dict[str, dict[ServerId, float]])

    # Engines without an agent.

    def begin_run(self, run_id: str) -> None:
        """Begin a run of the command; a controller that restarts within a run has the same id.

        A new run starts without engines; the command adds them.
        """
        known = self._db.execute("SELECT run_id FROM run").fetchone()
        if known == (run_id,):
            return
        with self._change() as db:
            for table in ("engines", "wishes", "members", "agents", "run"):
                db.execute(f"DELETE FROM {table}")  # noqa: S608 - the names above
            db.execute("INSERT INTO run VALUES (?)", (run_id,))

    def engines(self) -> list[EngineCard]:
        """Return all engines that were added and not removed."""
        rows = self._db.execute("SELECT card FROM engines ORDER BY url")
        return [msgspec.json.decode(card, type=EngineCard) for (card,) in rows]

    def add_engine(self, card: EngineCard) -> None:
        with self._change() as db:
            db.execute("REPLACE INTO engines VALUES (?, ?)", (card.url, _json(card)))

    def remove_engine(self, url: str) -> None:
        with self._change() as db:
            db.execute("DELETE FROM engines WHERE url = ?", (url,))

    # Wishes: requests for engines on other machines.

    def wishes(self) -> list[str]:
        """Return open wishes, oldest first."""
        return [wish for (wish,) in self._db.execute("SELECT wish FROM wishes ORDER BY rowid")]

    def add_wish(self, wish: str) -> None:
        with self._change() as db:
            db.execute("INSERT INTO wishes VALUES (?)", (wish,))

    def end_wish(self, wish: str) -> None:
        """Remove a wish."""
        with self._change() as db:
            db.execute("DELETE FROM wishes WHERE wish = ?", (wish,))

    # Engines that get requests, with or without an agent, and agents.

    def members(self) -> list[StoredMember]:
        rows = self._db.execute("SELECT card, pid, profile FROM members ORDER BY engine_id")
        return [
            StoredMember(
                msgspec.json.decode(card, type=EngineCard),
                pid,
                msgspec.json.decode(profile, type=EngineProfile),
            )
            for card, pid, profile in rows
        ]

    def agents(self) -> dict[str, str]:
        """Return the URLs of the last agents, by id."""
        return dict(self._db.execute("SELECT agent_id, url FROM agents ORDER BY agent_id"))

    def set_members(self, members: Iterable[StoredMember], agents: Mapping[str, str]) -> None:
        with self._change() as db:
            db.execute("DELETE FROM agents")
            db.executemany("INSERT INTO agents VALUES (?, ?)", agents.items())
            db.execute("DELETE FROM members")
            db.executemany(
                "INSERT INTO members VALUES (?, ?, ?, ?)",
                [(one.card.engine_id, _json(one.card), one.pid, _json(one.profile)) for one in members],
            )

    @contextmanager
    def _change(self) -> Iterator[sqlite3.Connection]:
        """Run one transaction. Raises ``ResourceError`` if the file cannot be written."""
        try:
            self._db.execute("BEGIN IMMEDIATE")
            yield self._db
            self._db.execute("COMMIT")
        except BaseException as error:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            if isinstance(error, sqlite3.Error):
                raise ResourceError(f"the registry cannot be written (--state-dir): {error}") from error
            raise


def _next(db: sqlite3.Connection, counter: str) -> int:
    row = db.execute(
        "INSERT INTO counters VALUES (?, 1) ON CONFLICT DO UPDATE SET value = value + 1 RETURNING value",
        (counter,),
    ).fetchone()
    return int(row[0])


def _put(db: sqlite3.Connection, entry: AdapterEntry, base_fingerprint: str) -> None:
    db.execute(
        "REPLACE INTO adapters VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (*msgspec.structs.astuple(entry), base_fingerprint),
    )


def _json(value: msgspec.Struct) -> str:
    return msgspec.json.encode(value).decode()


def _entry(row: Sequence[Any]) -> AdapterEntry:
    values = dict(zip(AdapterEntry.__struct_fields__, row, strict=False))
    return AdapterEntry(**values | {"pinned": bool(values["pinned"])})

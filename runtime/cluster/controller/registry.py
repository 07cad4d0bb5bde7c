"""The persistent state of a cluster in one SQLite file: adapters, copies, demand, placements.

Every method is one transaction, so a crash leaves the state between two calls. One thread of one
process owns a state directory. Times are seconds since the epoch, which hold over restarts.
"""

import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from ...errors import ResourceError
from ..policy.reports import ServerId, Shares
from ..wire import AdapterEntry, EngineCard, EngineProfile
from .registry_file import opened

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
        """Return all adapters, sorted by name."""
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
        """Return all copies that agents have reported."""
        rows = self._db.execute("SELECT digest, agent_id, is_kept, used_unix_s FROM copies")
        return [StoredCopy(one[0], one[1], bool(one[2]), one[3]) for one in rows]

    def set_copies(self, agent_id: str, copies: Iterable[StoredCopy]) -> None:
        """Replace the copies of an agent."""
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
        """Add a step of the placement."""
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
        """Return the last members."""
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
        """Replace all engines and agents."""
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

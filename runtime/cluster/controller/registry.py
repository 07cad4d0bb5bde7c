"""What the cluster must not forget, in one SQLite file: adapters, copies, demand, placements.

Every method is one transaction, so that a crash between any two leaves what either began or ended.
One process owns a state directory, from one thread. Times are seconds since the epoch: they must
hold over a restart.
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
    is_kept: bool  # the agent was ordered to, and has confirmed it
    used_unix_s: float


class StoredMember(msgspec.Struct, frozen=True):
    """An engine that gets requests."""

    card: EngineCard
    pid: int  # 0 = others run it
    profile: EngineProfile


class Registry:
    """The file, open. Raises ``ConfigError`` if it is held by another, foreign or corrupt."""

    def __init__(self, directory: Path, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock, self._db = opened(directory)
        with self._change() as db:
            self.start = _next(db, _START)  # how often a controller has begun on it

    def close(self) -> None:
        """Leave the directory to others. Idempotent."""
        self._db.close()
        self._lock.close()

    # Adapters.

    def adapters(self) -> list[AdapterEntry]:
        """All, by name."""
        return [_entry(row) for row in self._db.execute("SELECT * FROM adapters ORDER BY name")]

    def adapter(self, name: str) -> AdapterEntry | None:
        """One; None if there is none."""
        row = self._db.execute("SELECT * FROM adapters WHERE name = ?", (name,)).fetchone()
        return None if row is None else _entry(row)

    def base_fingerprints(self) -> dict[str, str]:
        """Of which base each adapter is, by name."""
        return dict(self._db.execute("SELECT name, base_fingerprint FROM adapters"))

    def begin_change(self, name: str, digest: str) -> int:
        """Note that content is about to be tried under a name; return its revision.

        Until ``end_change`` or ``undo_change`` an engine may have it, unknown to gateways.
        """
        with self._change() as db:
            revision = _next(db, _REVISION)
            db.execute("REPLACE INTO changes VALUES (?, ?, ?)", (name, revision, digest))
        return revision

    def end_change(self, entry: AdapterEntry, base_fingerprint: str) -> None:
        """From now on the name is what was tried."""
        with self._change() as db:
            _put(db, entry, base_fingerprint)
            db.execute("DELETE FROM changes WHERE name = ?", (entry.name,))
            db.execute("DELETE FROM unloads WHERE name = ?", (entry.name,))

    def undo_change(self, name: str) -> AdapterEntry | None:
        """Give up what was tried; return what the name is again, at a new revision.

        None: it is unloaded, and engines that have it are to be notified (``unloads``).
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
        """Digests by name of what was begun and neither ended nor undone."""
        return dict(self._db.execute("SELECT name, digest FROM changes ORDER BY name"))

    def set_entry(self, entry: AdapterEntry) -> None:
        """Say otherwise what is no content of an adapter: its pin, source or state."""
        with self._change() as db:
            db.execute(
                "UPDATE adapters SET source = ?, state = ?, reason = ?, pinned = ? WHERE name = ?",
                (entry.source, entry.state, entry.reason, entry.pinned, entry.name),
            )

    def unload(self, name: str) -> int:
        """The name stands for nothing any more; return from which revision on."""
        with self._change() as db:
            revision = _next(db, _REVISION)
            db.execute("DELETE FROM adapters WHERE name = ?", (name,))
            db.execute("REPLACE INTO unloads VALUES (?, ?)", (name, revision))
        return revision

    def unloads(self) -> dict[str, int]:
        """Names that engines may still have, and the revisions from which on they are gone."""
        return dict(self._db.execute("SELECT name, revision FROM unloads ORDER BY name"))

    def unloaded(self, name: str, revision: int) -> None:
        """No engine has it any more."""
        with self._change() as db:
            db.execute("DELETE FROM unloads WHERE name = ? AND revision = ?", (name, revision))

    # Copies.

    def copies(self) -> list[StoredCopy]:
        """All copies that agents have reported."""
        rows = self._db.execute("SELECT digest, agent_id, is_kept, used_unix_s FROM copies")
        return [StoredCopy(one[0], one[1], bool(one[2]), one[3]) for one in rows]

    def set_copies(self, agent_id: str, copies: Iterable[StoredCopy]) -> None:
        """What an agent has."""
        with self._change() as db:
            db.execute("DELETE FROM copies WHERE agent_id = ?", (agent_id,))
            db.executemany(
                "INSERT INTO copies VALUES (?, ?, ?, ?)",
                [(one.digest, one.agent_id, one.is_kept, one.used_unix_s) for one in copies],
            )

    # Demand and placements.

    def add_demand(self, tokens: Mapping[str, tuple[int, int]]) -> None:
        """So many tokens of prompts and outputs have come, by adapter, in this minute."""
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
        """Tokens of prompts and outputs by minute since the epoch, and adapter."""
        found: dict[int, dict[str, tuple[int, int]]] = {}
        rows = self._db.execute(
            "SELECT * FROM demand WHERE minute >= ? ORDER BY minute", (int(since_unix_s // 60),)
        )
        for minute, name, prompt, output in rows:
            found.setdefault(minute, {})[name] = (prompt, output)
        return found

    def add_placement(self, policy: str, shares: Shares, moved_bytes: int) -> None:
        """A step of the placement."""
        now_s = self._clock()
        with self._change() as db:
            db.execute(
                "INSERT INTO placements (at_unix_s, policy, shares, moved_bytes) "
                "VALUES (?, ?, ?, ?)",
                (now_s, policy, msgspec.json.encode(shares).decode(), moved_bytes),
            )
            db.execute("DELETE FROM placements WHERE at_unix_s < ?", (now_s - _KEPT_S,))

    def last_shares(self) -> Shares:
        """Of the last step; none if there was none."""
        row = self._db.execute(
            "SELECT shares FROM placements ORDER BY step DESC LIMIT 1"
        ).fetchone()
        if row is None:
            return {}
        return msgspec.json.decode(row[0], type=dict[str, dict[ServerId, float]])

    # Engines that others run.

    def begin_run(self, run_id: str) -> None:
        """Begin a run of the command; a controller that restarts within a run has the same id.

        A new command lists its engines itself.
        """
        known = self._db.execute("SELECT run_id FROM run").fetchone()
        if known == (run_id,):
            return
        with self._change() as db:
            for table in ("engines", "wishes", "members", "agents", "run"):
                db.execute(f"DELETE FROM {table}")  # noqa: S608 - the names above
            db.execute("INSERT INTO run VALUES (?)", (run_id,))

    def engines(self) -> list[EngineCard]:
        """All that were added and not removed."""
        rows = self._db.execute("SELECT card FROM engines ORDER BY url")
        return [msgspec.json.decode(card, type=EngineCard) for (card,) in rows]

    def add_engine(self, card: EngineCard) -> None:
        """One more."""
        with self._change() as db:
            db.execute("REPLACE INTO engines VALUES (?, ?)", (card.url, _json(card)))

    def remove_engine(self, url: str) -> None:
        """One less."""
        with self._change() as db:
            db.execute("DELETE FROM engines WHERE url = ?", (url,))

    # Wishes for engines, on machines that another process finds.

    def wishes(self) -> list[str]:
        """All wishes that are not taken yet, the oldest first."""
        return [wish for (wish,) in self._db.execute("SELECT wish FROM wishes ORDER BY rowid")]

    def add_wish(self, wish: str) -> None:
        """One more."""
        with self._change() as db:
            db.execute("INSERT INTO wishes VALUES (?)", (wish,))

    def end_wish(self, wish: str) -> None:
        """One less."""
        with self._change() as db:
            db.execute("DELETE FROM wishes WHERE wish = ?", (wish,))

    # Engines that get requests, with or without an agent, and agents.

    def members(self) -> list[StoredMember]:
        """All that were there last."""
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
        """URLs of all that were there last."""
        return dict(self._db.execute("SELECT agent_id, url FROM agents ORDER BY agent_id"))

    def set_members(self, members: Iterable[StoredMember], agents: Mapping[str, str]) -> None:
        """These engines and agents are there, and no others."""
        with self._change() as db:
            db.execute("DELETE FROM agents")
            db.executemany("INSERT INTO agents VALUES (?, ?)", agents.items())
            db.execute("DELETE FROM members")
            db.executemany(
                "INSERT INTO members VALUES (?, ?, ?, ?)",
                [
                    (one.card.engine_id, _json(one.card), one.pid, _json(one.profile))
                    for one in members
                ],
            )

    @contextmanager
    def _change(self) -> Iterator[sqlite3.Connection]:
        """One transaction. Raises ``ResourceError`` if the disk is full, or broken."""
        try:
            self._db.execute("BEGIN IMMEDIATE")
            yield self._db
            self._db.execute("COMMIT")
        except BaseException as error:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            if isinstance(error, sqlite3.Error):
                raise ResourceError(
                    f"the registry cannot be written (--state-dir): {error}"
                ) from error
            raise


def _next(db: sqlite3.Connection, counter: str) -> int:
    row = db.execute(
        "INSERT INTO counters VALUES (?, 1) ON CONFLICT DO UPDATE SET value = value + 1 "
        "RETURNING value",
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
    """From a row of ``adapters``."""
    values = dict(zip(AdapterEntry.__struct_fields__, row, strict=False))
    return AdapterEntry(**values | {"pinned": bool(values["pinned"])})

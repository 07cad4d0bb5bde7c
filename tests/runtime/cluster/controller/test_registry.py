"""What the registry keeps over crashes between any two steps, and what it refuses."""

import contextlib
import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from corun.runtime.cluster.controller.registry import Registry, StoredCopy
from corun.runtime.cluster.policy.reports import ServerId
from corun.runtime.cluster.wire import AdapterEntry, EngineCard
from corun.runtime.errors import ConfigError
from hypothesis import given, settings
from hypothesis import strategies as st

_DAY_S = 24 * 3600.0


def opened(directory: Path, now_s: float = 0.0) -> Registry:
    return Registry(directory, lambda: now_s)


def entry_of(name: str, revision: int, digest: str = "d", *, pinned: bool = False) -> AdapterEntry:
    return AdapterEntry(
        name=name, revision=revision, digest=digest, rank=8, num_bytes=10, source="/s", pinned=pinned
    )


def test_all_is_there_again(tmp_path: Path) -> None:
    registry = opened(tmp_path, 600.0)
    entry = entry_of("x", registry.begin_change("x", "d"), pinned=True)
    registry.end_change(entry, "base")
    copies = [StoredCopy("d", "a", is_kept=True, used_unix_s=5.0)]
    registry.set_copies("a", copies)
    registry.add_demand({"x": (3, 4)})
    registry.add_demand({"x": (1, 1)})
    registry.add_placement("sticky", {"x": {ServerId("a-0"): 1.0}}, 10)
    registry.begin_run("one")
    registry.add_engine(EngineCard(engine_id="http://e", url="http://e"))
    registry.set_members([], {"a": "http://a"})
    for wish in ("b", "a", "c"):
        registry.add_wish(wish)
    registry.end_wish("a")
    start = registry.start
    registry.close()
    registry = opened(tmp_path, 600.0)
    assert registry.adapters() == [entry] and registry.base_fingerprints() == {"x": "base"}
    assert registry.copies() == copies
    assert registry.demand(0.0) == {10: {"x": (4, 5)}}
    assert registry.last_shares() == {"x": {"a-0": 1.0}}
    registry.begin_run("one")
    assert [one.url for one in registry.engines()] == ["http://e"] and registry.start == start + 1
    assert registry.agents() == {"a": "http://a"} and registry.wishes() == ["b", "c"]
    registry.begin_run("two")
    assert registry.engines() == [] and registry.agents() == {} and registry.wishes() == []
    registry.close()


def test_an_empty_file_of_a_power_cut_begins_an_empty_registry(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "registry.sqlite").touch()
    (tmp_path / "registry.sqlite-wal").write_bytes(b"of another file")
    registry = opened(tmp_path, 60.0)
    assert registry.adapters() == []
    assert "is empty" in caplog.text
    registry.add_wish("a")
    registry.close()
    registry = opened(tmp_path, 60.0)
    assert registry.wishes() == ["a"]
    registry.close()


def test_a_file_from_before_there_were_wishes_gets_them(tmp_path: Path) -> None:
    opened(tmp_path, 60.0).close()
    with contextlib.closing(sqlite3.connect(tmp_path / "registry.sqlite")) as db:
        db.execute("DROP TABLE wishes")
    registry = opened(tmp_path, 60.0)
    registry.add_wish("a")
    assert registry.wishes() == ["a"]
    registry.close()


def test_demand_and_placements_are_forgotten_after_a_day(tmp_path: Path) -> None:
    registry = opened(tmp_path, 60.0)
    registry.add_demand({"x": (3, 4)})
    registry.add_placement("sticky", {"x": {}}, 0)
    registry.close()
    registry = opened(tmp_path, 120.0 + _DAY_S)
    registry.add_demand({"y": (1, 1)})
    assert list(registry.demand(0.0)) == [1442]
    registry.close()


def test_a_directory_has_one_controller(tmp_path: Path) -> None:
    registry = opened(tmp_path)
    with pytest.raises(ConfigError, match=rf"held by another controller \(process {os.getpid()}\)"):
        opened(tmp_path)
    registry.close()
    opened(tmp_path).close()


def test_what_is_no_registry_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "registry.sqlite"
    path.write_bytes(b"another format" * 1000)
    with pytest.raises(ConfigError, match=r"is damaged \(file is not a database\)") as damaged:
        opened(tmp_path)
    assert path.read_bytes() == b"another format" * 1000 and "\n" not in str(damaged.value)
    path.unlink()
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE others (x)")
    db.close()
    with pytest.raises(ConfigError, match="is not the registry of a cluster"):
        opened(tmp_path)


def test_a_damaged_page_is_found(tmp_path: Path) -> None:
    registry = opened(tmp_path)
    for number in range(200):
        name = f"x{number}"
        registry.end_change(entry_of(name, registry.begin_change(name, "d" * 100)), "base")
    registry.close()
    path = tmp_path / "registry.sqlite"
    content = bytearray(path.read_bytes())
    content[4096 * 3 : 4096 * 3 + 2048] = b"\xff" * 2048
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="is damaged"):
        opened(tmp_path)


def test_another_version_is_refused(tmp_path: Path) -> None:
    opened(tmp_path).close()
    db = sqlite3.connect(tmp_path / "registry.sqlite")
    db.execute("PRAGMA user_version = 7")
    db.close()
    with pytest.raises(ConfigError, match="is of version 7, but this corun reads version 2"):
        opened(tmp_path)


_WRITER = """
import sys
from pathlib import Path
from corun.runtime.cluster.controller.registry import Registry
from corun.runtime.cluster.wire import AdapterEntry
registry = Registry(Path(sys.argv[1]), lambda: 0.0)
while True:
    revision = registry.begin_change("x", "d")
    registry.end_change(AdapterEntry(name="x", revision=revision, digest="d", rank=8, num_bytes=1,
                                     source="/s"), "base")
    print(revision, flush=True)
"""


def test_committed_changes_are_there_after_a_kill(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", _WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    with process.stdout as output:
        for _ in range(20):
            last = int(output.readline())
        process.send_signal(signal.SIGKILL)
        process.wait()
        last = max([last, *(int(line) for line in output.read().splitlines())])
    registry = opened(tmp_path)
    (entry,) = registry.adapters()
    assert entry.revision in (last, last + 1)
    assert registry.begin_change("x", "d") > entry.revision
    registry.close()


# Changes of a name, and whether the controller crashes before the next step.
_STEPS = st.lists(
    st.tuples(
        st.sampled_from(["load", "undo", "unload"]),
        st.sampled_from("xy"),
        st.sampled_from("pqr"),
        st.sampled_from(["", "after begin", "after all"]),
    ),
    max_size=8,
)


@given(_STEPS)
@settings(max_examples=40, deadline=None)
def test_crashes_lose_no_adapter_and_no_revision_comes_again(steps: list[tuple[str, str, str, str]]) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        registry = opened(Path(directory))
        expected: dict[str, str] = {}  # digests that clients got as answers
        seen: list[int] = []

        def crash() -> Registry:
            """Keep only what is on disk, as a crash does."""
            registry.close()
            after = opened(Path(directory))
            for name in after.open_changes():
                undone = after.undo_change(name)
                seen.append(after.unloads()[name] if undone is None else undone.revision)
            return after

        for kind, name, digest, fault in steps:
            if kind == "unload":
                if name in expected:
                    seen.append(registry.unload(name))
                    del expected[name]
                continue
            revision = registry.begin_change(name, digest)
            seen.append(revision)
            if fault == "after begin":
                registry = crash()
                continue
            if kind == "undo":
                undone = registry.undo_change(name)
                seen.append(registry.unloads()[name] if undone is None else undone.revision)
            else:
                registry.end_change(entry_of(name, revision, digest), "base")
                expected[name] = digest
            if fault == "after all":
                registry = crash()
        assert {one.name: one.digest for one in registry.adapters()} == expected
        assert not registry.open_changes() and not {*registry.unloads()} & {*expected}
        assert seen == sorted(set(seen))
        registry.close()

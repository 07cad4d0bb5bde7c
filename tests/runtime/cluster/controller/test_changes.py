"""Crashes between any two steps of a change: names keep a copy and never get old content."""

import asyncio
import tempfile
from pathlib import Path

from corun.runtime.cluster.controller.changes import AdapterChanges
from corun.runtime.cluster.controller.registry import Registry
from corun.runtime.cluster.controller.table import RoutingTable
from corun.runtime.cluster.wire import AdapterChange, AdapterEntry, CheckedAdapter, EngineCard
from corun.runtime.errors import CorunError
from corun.runtime.server.errors import HttpError
from hypothesis import given, settings
from hypothesis import strategies as st
from support.fake_cluster import digest_of, profile_of

_ENGINES = ("e0", "e1")
# Action, name, content, whether it is refused (or pinned), and steps until a crash.
Step = tuple[str, str, str, bool, int | None]


class CrashedError(BaseException):
    """The controller crashes."""


class World:
    """Engines and files, which outlive controllers. Each call may be the last step."""

    def __init__(self) -> None:
        self.served: dict[str, dict[str, AdapterEntry]] = {one: {} for one in _ENGINES}
        self.files: set[str] = set()
        self.steps_left: int | None = None  # until a crash
        self.refuses = False
        # The interface of ``Members``.
        self.base = profile_of()

    def step(self) -> None:
        if self.steps_left is not None:
            self.steps_left -= 1
            if self.steps_left < 0:
                raise CrashedError

    def open_engines(self) -> list[EngineCard]:
        return [EngineCard(engine_id=one, url=one, agent_id="a") for one in _ENGINES]

    def targets(self) -> set[str]:
        return {"a"}

    async def check(self, path: str) -> tuple[str, CheckedAdapter]:
        self.step()
        self.files.add(digest_of(path))
        self.step()
        return "a", CheckedAdapter(digest=digest_of(path), rank=8, num_bytes=1)

    async def ensure(self, engine_id: str, entry: AdapterEntry) -> None:
        self.step()
        assert entry.digest in self.files
        if self.refuses:
            raise HttpError(400, "it is refused", code="adapter_failed")
        before = self.served[engine_id].get(entry.name)
        if before is None or before.revision < entry.revision:
            self.served[engine_id][entry.name] = entry
        self.step()

    async def unload(self, target: str, name: str, revision: int) -> None:
        self.step()
        for names in self.served.values():
            if name in names and names[name].revision < revision:
                del names[name]
        self.step()

    async def pin(self, target: str, name: str, *, pinned: bool) -> None:
        self.step()

    def check_can_pin(self) -> None:
        pass

    async def state(self, engine_id: str) -> None:
        raise HttpError(503, "no other engine", code="unreachable")


class CrashingTable(RoutingTable):
    """A table in which a crash may come before gateways get a change."""

    world: World

    async def confirmed(self, timeout_s: float) -> None:
        self.world.step()


_CHANGE = st.tuples(
    st.sampled_from(["load", "unload", "pin"]),
    st.sampled_from("xy"),
    st.sampled_from("pq"),
    st.booleans(),
    st.one_of(st.none(), st.integers(0, 6)),
)


def begun(registry: Registry, world: World) -> tuple[CrashingTable, AdapterChanges]:
    table = CrashingTable(registry.start)
    table.world = world
    changes = AdapterChanges(registry, table, world, world)  # type: ignore[arg-type]
    changes.recover()
    return table, changes


async def crash_at_will(directory: Path, steps: list[tuple[str, str, str, bool, int | None]]) -> None:
    world = World()
    registry = Registry(directory, lambda: 0.0)
    table, changes = begun(registry, world)
    answered: dict[str, str] = {}  # by name: digests that clients got as answers
    unsure: set[str] = set()  # names of changes that were not answered
    highest = 0
    for action, name, content, refuses, crash_after in steps:
        world.refuses, world.steps_left = refuses, crash_after
        change = AdapterChange(
            action=action,
            name=name,
            load_inplace=True,
            path=content if action == "load" else None,
            pinned=refuses if action == "pin" else None,
        )
        try:
            await changes.apply(change)
            if action == "load":
                answered[name] = digest_of(content)
            elif action == "unload":
                answered.pop(name, None)
            unsure.discard(name)
        except CorunError:
            pass
        except CrashedError:
            if action != "pin":
                unsure.add(name)
            registry.close()
            registry = Registry(directory, lambda: 0.0)
            world.steps_left = None
            table, changes = begun(registry, world)
        world.steps_left = None
        check(world, table, answered, unsure)
        for entry in table.adapters.values():
            highest = max(highest, entry.revision)
    # A name that is loaded now has a newer revision than before.
    world.refuses = False
    entry = await changes.apply(AdapterChange(action="load", name="z", path="last"))
    assert entry.revision > highest
    await changes.close()
    registry.close()


def check(world: World, table: RoutingTable, answered: dict[str, str], unsure: set[str]) -> None:
    for name, entry in table.adapters.items():
        assert entry.digest in world.files  # no route to missing files
        for served in world.served.values():
            mine = served.get(name)
            # Every engine that may get requests has the content of the table.
            if mine is not None and mine.revision >= entry.revision:
                assert mine.digest == entry.digest
    for name in "xy":
        if name not in unsure:
            known = table.adapters.get(name)
            assert (None if known is None else known.digest) == answered.get(name)
        elif name in table.adapters:
            answered[name] = table.adapters[name].digest
        else:
            answered.pop(name, None)


@given(st.lists(_CHANGE, max_size=8))
@settings(max_examples=40, deadline=None)
def test_crashes_between_any_two_steps(steps: list[Step]) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        asyncio.run(crash_at_will(Path(directory), steps))

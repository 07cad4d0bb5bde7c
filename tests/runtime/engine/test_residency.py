"""Published levels of adapters are true after any sequence of events, and only changes are sent."""

import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from mmap import PAGESIZE

import pytest
from corun.runtime.adapter import AdapterFacts, AdapterLayers, AdapterOutline
from corun.runtime.adapters.content import AdapterContent
from corun.runtime.adapters.info import AdapterInfo
from corun.runtime.adapters.registry import AdapterVersion
from corun.runtime.adapters.resolved import AdapterPath
from corun.runtime.engine.adapter_manager import AdapterManager
from corun.runtime.engine.adapter_reading import MakeRoom
from corun.runtime.engine.core import CoreConfig, EngineCore
from corun.runtime.engine.messages import AdaptersChanged, AddRequest, PinAdapter, RemoveAdapter
from corun.runtime.errors import RequestError
from corun.runtime.frontend.inputs import LoraDirectory
from corun.runtime.memory.host_cache import HostCache
from corun.runtime.plan import AdapterTransfer, HostPlaceId, KvTransfer
from corun.runtime.sampling import SamplingParams
from corun.runtime.scheduler.events import RequestUpdate
from hypothesis import given, settings
from hypothesis import strategies as st
from support.scheduling import make_executor, make_memory, make_scheduler

GROUP_BYTES = (120, 80)
NAMES = "abcde"
LOADS = ("request", "turn", "step", "group", "end load", "copies", "evict")
OPERATIONS = (*LOADS, "fail load", "add", "remove", "pin", "abort")


class NoHost:
    """Stores nothing at registration: loads read files."""

    def evict(self, place_ids: Iterable[HostPlaceId]) -> None:
        assert not tuple(place_ids)

    def remove_content(self, digest: str) -> None:
        pass


class World:
    """An engine's core with its adapters, and a front end that receives their changes."""

    def __init__(self, *, num_host_adapters: int = 2, depth: int = 1) -> None:
        host = HostCache(num_host_adapters * 2 * PAGESIZE)
        memory = make_memory(num_blocks=14, keeps_prefixes=True, num_host_slots=6, host=host, policy="corun")
        self.scheduler = make_scheduler(memory=memory, max_num_seqs=3)
        self.executor = make_executor(self.scheduler, is_automatic=False)
        self.contents: dict[str, str] = {}
        self.manager = AdapterManager(self, (), NoHost())
        config = CoreConfig(base_fingerprint="demo", dtype="float32", max_steps_in_flight=depth)
        self.now_s = 0.0
        self.core = EngineCore(
            self.scheduler,
            self.executor,
            self.manager,
            config,
            clock=lambda: self.now_s,
            on_adapter_gone=self.manager.remove_version,
            unix_clock=lambda: 1000.0 + self.now_s,
        )
        self.manager.attach(self.core)
        self.mirror = LoraDirectory(self.manager.infos())
        self.num_requests = 0
        self.levels = Counter[str]()  # that were published

    def outline(self, path: AdapterPath) -> AdapterOutline:
        raise NotImplementedError

    def begin(self, path: AdapterPath) -> None:
        raise NotImplementedError

    def read(self, path: AdapterPath, make_room: MakeRoom, known: AdapterVersion | None) -> AdapterContent:
        layers = AdapterLayers(((8,), (8,)), GROUP_BYTES, (0, 1))
        facts = AdapterFacts(
            self.contents[str(path)], 8, sum(GROUP_BYTES), layers=layers, host_bytes=(PAGESIZE, PAGESIZE)
        )
        return AdapterContent(facts)

    def add(self, name: str, content: str) -> None:
        self.contents["/" + name] = content
        self.manager.add_now(name, "/" + name)

    def ask(self, name: str | None, tokens: tuple[int, ...], max_tokens: int) -> None:
        self.num_requests += 1
        sampling = SamplingParams(max_tokens=max_tokens, seed=0)
        self.core.add_request(AddRequest(self.num_requests, tokens, sampling, name))

    def turn(self) -> list[RequestUpdate]:
        self.now_s += 0.25
        return self.core.step()

    def finish_step(self) -> None:
        """End the oldest step in flight, and continue."""
        if self.executor.steps:
            self.executor.finish_step()
        self.turn()

    def load_group(self) -> None:
        """Let a layer group of the oldest load arrive."""
        for transfer_id, transfer in self.executor.transfers.items():
            if isinstance(transfer, AdapterTransfer):
                self.executor.progress_transfer(transfer_id, 1)
                return

    def end(self, kind: type[AdapterTransfer | KvTransfer], *, error: str | None = None) -> None:
        for transfer_id, transfer in [*self.executor.transfers.items()]:
            if isinstance(transfer, kind):
                self.executor.finish_transfer(transfer_id, error)
                return

    def hear(self) -> None:
        """Apply published changes; they must be complete."""
        for told in self.manager.poll():
            if isinstance(told, AdaptersChanged):
                assert told.adapters or told.removed, "nothing is published"
                for info in told.adapters:
                    assert info != self.mirror.get(info.name), "it is known"
                    self.levels[info.residency.level] += 1
                self.mirror.update(told.adapters, told.removed)
        assert tuple(self.mirror.list()) == self.manager.infos()
        for info in self.mirror.list():
            self._check(info)

    def _check(self, info: AdapterInfo) -> None:
        """Compare with the account and the device."""
        memory, residency = self.scheduler.memory, info.residency
        if info.state not in ("ready", "draining"):
            return
        versions = [one for one in memory.cache.resident_ids() if self.manager.version(one).name == info.name]
        is_there = residency.level == "device" or any(
            one.residency.level == "device" for one in info.draining
        )
        assert not is_there or versions, info
        assert (residency.level == "partial") == (0 < residency.num_groups_loaded <= residency.num_groups), (
            info
        )
        if residency.level in ("device", "partial"):
            assert residency.device_bytes == sum(GROUP_BYTES)
        assert memory.host is not None
        assert (residency.host_bytes > 0) == memory.host.contains(info.version)
        assert residency.level != "host" or residency.host_bytes == 2 * PAGESIZE
        assert residency.level != "disk" or not residency.host_bytes

    @contextmanager
    def open(self) -> "Iterator[World]":
        try:
            yield self
        finally:
            self.manager.close()


def do(world: World, operation: str, rng: random.Random) -> None:
    """Do one operation; impossible ones are refused."""
    name = rng.choice(NAMES)
    tokens = (rng.randrange(2),) * rng.choice((3, 5, 9))
    happen: dict[str, Callable[[], object]] = {
        "request": lambda: world.ask(rng.choice((name, name, None)), tokens, rng.randint(1, 6)),
        "turn": world.turn,
        "step": world.finish_step,
        "group": world.load_group,
        "end load": lambda: world.end(AdapterTransfer),
        "fail load": lambda: world.end(AdapterTransfer, error="broken"),
        "copies": lambda: world.end(KvTransfer),
        "add": lambda: world.add(name, rng.choice("xyz")),
        "remove": lambda: world.manager.handle(RemoveAdapter(1, name)),
        "pin": lambda: world.manager.handle(PinAdapter(1, name, pinned=rng.random() < 0.5)),
        "abort": lambda: world.core.abort([rng.randint(1, world.num_requests + 1)]),
        "evict": lambda: world.core.evict_adapter(name),
    }
    with suppress(RequestError):
        happen[operation]()


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.lists(st.sampled_from(OPERATIONS), max_size=60))
def test_deltas_say_what_a_whole_look_would(seed: int, operations: list[str]) -> None:
    rng = random.Random(seed)
    with World(depth=1 + seed % 2).open() as world:
        for number, name in enumerate(NAMES):
            world.add(name, "xyz"[number % 3])
        world.hear()
        for operation in operations:
            do(world, operation, rng)
            if rng.random() < 0.7:
                world.hear()
        world.hear()


def test_random_lives_reach_every_level() -> None:
    levels = Counter[str]()
    for seed in range(12):
        rng = random.Random(seed)
        with World().open() as world:
            for number, name in enumerate(NAMES):
                world.add(name, f"content {number}")
            for _ in range(150):
                do(world, rng.choice(LOADS), rng)
                world.hear()
            levels += world.levels
    assert min(levels[level] for level in ("device", "partial", "host", "disk")) > 20, levels


def test_a_life_from_disk_to_the_device_and_back() -> None:
    with World().open() as world:
        world.add("a", "x")
        world.hear()

        def told() -> AdapterInfo:
            world.hear()
            info = world.mirror.get("a")
            assert info is not None
            return info

        assert told().residency.level == "disk"
        world.ask("a", (1, 2, 3), 2)
        assert told().residency.num_waiting == 1
        world.turn()
        (load_id,) = world.executor.transfers
        assert told().residency.level == "disk", "nothing of it is there yet"
        world.executor.progress_transfer(load_id, 1)
        world.turn()
        partial = told().residency
        assert (partial.level, partial.num_groups_loaded, partial.num_groups) == ("partial", 1, 2)
        world.now_s = 5.0
        world.end(AdapterTransfer)
        world.finish_step()
        there = told().residency
        assert (there.level, there.host_bytes, there.num_references) == ("device", 2 * PAGESIZE, 1)
        assert there.loads["host_to_device"][0] == there.loads["disk_to_host"][0] == 1
        assert there.num_uses == 1
        assert there.last_use_unix_s == pytest.approx(1005.25)
        while world.core.has_work:
            world.finish_step()
        assert (told().residency.num_references, told().residency.num_waiting) == (0, 0)
        assert world.core.evict_adapter("a")
        world.turn()
        away = told().residency
        assert (away.level, away.device_bytes) == ("host", 0)
        assert away.evictions == {"device": {"asked": 1}}


def test_versions_that_drain_are_told_beside_the_one_that_serves() -> None:
    with World().open() as world:
        world.add("a", "x")
        world.ask("a", (1, 2, 3), 4)
        world.turn()
        world.add("a", "y")
        world.hear()
        info = world.mirror.get("a")
        assert info is not None and (info.state, info.version) == ("ready", "y")
        assert [one.version for one in info.draining] == ["x"]
        world.manager.handle(RemoveAdapter(1, "a"))
        world.hear()
        info = world.mirror.get("a")
        assert info is not None and (info.state, info.version) == ("draining", "x")
        world.core.abort([1])
        world.turn()
        world.end(AdapterTransfer)
        world.turn()
        world.hear()
        assert world.mirror.get("a") is None

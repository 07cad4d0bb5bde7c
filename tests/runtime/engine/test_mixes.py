"""The registered mixes: made of versions in service, and removed with them."""

import itertools

import pytest
from corun.runtime.adapter import AdapterFacts, AdapterOutline
from corun.runtime.adapters.content import AdapterContent
from corun.runtime.adapters.conventions import NO_CONVENTIONS, AdapterConventions
from corun.runtime.adapters.mix import LoRAMix
from corun.runtime.adapters.registry import AdapterRegistry, LoadId
from corun.runtime.adapters.resolved import MixSource
from corun.runtime.engine.adapter_mixes import MAX_IDLE_MIXES, AdapterMixes
from corun.runtime.engine.adapter_reading import ReadJob
from corun.runtime.errors import AdapterChangedError, AdapterFailedError, RequestError, UnknownModelError
from corun.runtime.plan import AdapterId
from support.invariants import check_invariants


class World:
    """A registry with its mixes; a test says when their reads end."""

    def __init__(self) -> None:
        ids = itertools.count(1)
        self.registry = AdapterRegistry(lambda: AdapterId(next(ids)))
        self.mixes = AdapterMixes(self.registry, self.must_read, self.begin, self.remove)
        self.begun: dict[str, tuple[MixSource, LoadId]] = {}
        for name in "abc":
            self.add(name, name)

    def must_read(self, name: str) -> bool:
        return self.registry.unread_path(name) is not None

    def begin(self, job: ReadJob) -> None:
        assert isinstance(job.path, MixSource)
        self.begun[job.name] = job.path, self.registry.begin_loading(job.name, job.path)

    def remove(self, name: str) -> None:
        self.registry.remove(name)

    def must_wait(self, mix: LoRAMix) -> bool:
        return self.mixes.must_wait(mix.lora_name, mix)

    def read(self, mix: LoRAMix, error: str | None = None) -> MixSource:
        """Begin and end the read of a mix; return what it is read from."""
        assert self.must_wait(mix)
        source, load_id = self.begun.pop(mix.lora_name)
        if error is None:
            content = content_of(mix.lora_name, source.conventions)
            assert self.registry.ready(mix.lora_name, source, load_id, content) is not None
        else:
            self.registry.failed(mix.lora_name, load_id, error)
        assert self.mixes.note_read(mix.lora_name)
        assert not self.must_wait(mix)
        return source

    def add(self, name: str, digest: str, conventions: AdapterConventions = NO_CONVENTIONS) -> None:
        load_id = self.registry.begin_loading(name, f"/{name}")
        content = content_of(digest, conventions)
        assert self.registry.ready(name, f"/{name}", load_id, content) is not None

    def serves(self, mix: LoRAMix) -> bool:
        return self.registry.serving(mix.lora_name) is not None


def content_of(digest: str, conventions: AdapterConventions) -> AdapterContent:
    return AdapterContent(AdapterFacts(digest, 8, 100), conventions)


MIX = LoRAMix([("a", 1), ("b", 0.5)])


def test_requests_wait_for_parts_and_then_for_the_mix() -> None:
    world = World()
    world.registry.remove("b")
    load_id = world.registry.begin_loading("b", "/b")
    assert world.must_wait(MIX) and not world.begun, "b is being read"
    world.registry.outlined("b", load_id, AdapterOutline(8, 100))
    assert world.must_wait(MIX) and not world.begun, "b has not been read"
    world.add("b", "b2")
    source = world.read(MIX)
    assert [(part.name, part.digest, part.scale) for part in source.parts] == [
        ("a", "a", 1.0),
        ("b", "b2", 0.5),
    ]
    world.mixes.use(MIX.lora_name)
    world.mixes.use("a")
    assert world.registry.resolve(MIX.lora_name).digest == MIX.lora_name


def test_parts_that_cannot_be_used() -> None:
    world = World()
    unknown = LoRAMix([("a", 1), ("x", 1)])
    assert not world.must_wait(unknown)
    with pytest.raises(UnknownModelError, match="'x'"):
        world.mixes.use(unknown.lora_name)
    world.add("a", "a", AdapterConventions(template="x", digest="x"))
    world.add("b", "b", AdapterConventions(template="y", digest="y"))
    assert not world.must_wait(MIX)
    with pytest.raises(RequestError, match="different chat templates"):
        world.mixes.use(MIX.lora_name)
    assert world.read(LoRAMix([("a", 1), ("c", 1)])).conventions.template == "x"


def test_a_mix_goes_with_each_of_its_parts() -> None:
    world, other = World(), LoRAMix([("b", 1), ("c", 1)])
    world.read(MIX)
    world.read(other)
    world.mixes.drop_with("a")
    assert not world.serves(MIX) and world.serves(other)
    with pytest.raises(AdapterChangedError, match="loaded again"):
        world.mixes.use(MIX.lora_name)  # it has waited for something else meanwhile
    assert world.must_wait(MIX)
    world.mixes.drop_with("b")
    assert not world.registry.is_loading(MIX.lora_name) and not world.serves(other)


def test_a_failure_is_told_once() -> None:
    world = World()
    world.read(MIX, error="too large")
    for _ in range(2):  # all requests that waited
        world.mixes.use(MIX.lora_name)
        with pytest.raises(AdapterFailedError, match="too large"):
            world.registry.resolve(MIX.lora_name)
    world.mixes.drop_unused()
    world.read(MIX)


def test_few_idle_mixes_are_kept() -> None:
    world = World()
    mixes = [LoRAMix([("a", number)]) for number in range(2, MAX_IDLE_MIXES + 5)]
    for mix in mixes:
        world.read(mix)
    running = world.registry.resolve(mixes[0].lora_name).adapter_id
    world.registry.acquire(running)
    world.mixes.use(mixes[1].lora_name)
    world.mixes.drop_unused()
    assert [world.serves(mix) for mix in mixes] == [True, True, False, False] + [True] * (MAX_IDLE_MIXES - 1)
    check_invariants(world.registry)

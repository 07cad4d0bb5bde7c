"""Names, versions and references: scenarios, and a state machine against a simple model."""

from itertools import count

import pytest
from corun.runtime.adapter import AdapterFacts, AdapterOutline
from corun.runtime.adapters.content import AdapterContent
from corun.runtime.adapters.conventions import NO_CONVENTIONS, AdapterConventions
from corun.runtime.adapters.names import check_adapter_name
from corun.runtime.adapters.registry import AdapterRegistry, LoadId, Registered
from corun.runtime.engine_state import Residency
from corun.runtime.errors import AdapterError, AdapterFailedError, AdapterUnavailableError, UnknownModelError
from corun.runtime.plan import AdapterId
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule
from support.invariants import check_invariants


def make_registry() -> AdapterRegistry:
    ids = count(1)
    return AdapterRegistry(lambda: AdapterId(next(ids)), base_names=("base",))


def facts(digest: str = "d1") -> AdapterFacts:
    return AdapterFacts(digest, rank=8, num_bytes=100)


def load(registry: AdapterRegistry, name: str, digest: str = "d1") -> Registered:
    registered = registry.ready(
        name, "path", registry.begin_loading(name, "path"), AdapterContent(facts(digest))
    )
    assert registered is not None
    return registered


def test_a_version_serves_once_it_is_ready() -> None:
    registry = make_registry()
    load_id = registry.begin_loading("a", "dir")
    assert registry.infos(lambda _: Residency())[0].state == "loading"
    with pytest.raises(AdapterUnavailableError, match="'a' is loading"):
        registry.resolve("a")
    registered = registry.ready("a", "dir", load_id, AdapterContent(facts()))
    assert registered is not None and registered.is_new
    version = registry.resolve("a")
    assert (version.name, version.path, version.digest) == ("a", "dir", "d1")
    assert (version.rank, version.num_bytes, version.scale) == (8, 100, 1.0)
    assert registry.version(version.adapter_id) is version
    (info,) = registry.infos(lambda _: Residency(level="device"))
    assert (info.state, info.version, info.is_resident) == ("ready", "d1", True)


def test_a_failed_load_is_kept_with_its_reason_and_can_be_repeated() -> None:
    registry = make_registry()
    registry.failed("a", registry.begin_loading("a", "dir"), "no such file")
    with pytest.raises(AdapterUnavailableError, match="'a' failed to load: no such file"):
        registry.resolve("a")
    (info,) = registry.infos(lambda _: Residency())
    assert (info.state, info.reason, info.path) == ("failed", "no such file", "dir")
    load(registry, "a")
    assert registry.infos(lambda _: Residency())[0].reason is None


def test_what_was_not_read_serves_by_its_outline_until_it_is() -> None:
    registry = make_registry()
    registry.outlined("a", registry.begin_loading("a", "dir"), AdapterOutline(16, 300))
    (info,) = registry.infos(lambda _: Residency())
    assert (info.state, info.rank, info.num_bytes, info.version) == ("ready", 16, 300, "")
    assert registry.unread_path("a") == "dir" and not registry.is_loading("a")
    assert registry.largest_unpinned_bytes(without="b") == 300
    load_id = registry.begin_loading("a", "dir")
    assert registry.is_loading("a")
    assert registry.infos(lambda _: Residency())[0].state == "ready"
    with pytest.raises(AdapterUnavailableError, match="is loading"):
        registry.resolve("a")
    registry.ready("a", "dir", load_id, AdapterContent(facts()))
    assert registry.unread_path("a") is None
    assert registry.resolve("a").rank == 8


def test_an_outline_whose_files_are_bad_has_failed() -> None:
    registry = make_registry()
    registry.outlined("a", registry.begin_loading("a", "dir"), AdapterOutline(16, 300))
    registry.failed("a", registry.begin_loading("a", "elsewhere"), "no such file")
    assert registry.unread_path("a") == "dir"  # another path was bad, not this one
    registry.failed("a", registry.begin_loading("a", "dir"), "damaged")
    assert registry.unread_path("a") is None
    with pytest.raises(AdapterFailedError, match="damaged"):
        registry.resolve("a")


def test_a_failed_reload_leaves_the_old_version() -> None:
    registry = make_registry()
    version = load(registry, "a").version
    registry.failed("a", registry.begin_loading("a", "other"), "damaged")
    assert registry.resolve("a") is version
    (info,) = registry.infos(lambda _: Residency())
    assert (info.state, info.path, info.reason) == ("ready", "path", "damaged")


def test_reload_makes_a_new_version_and_drains_the_old_one() -> None:
    registry = make_registry()
    old = load(registry, "a", "d1").version
    registry.acquire(old.adapter_id)
    registered = load(registry, "a", "d2")
    assert registered.is_new
    assert registered.freed == ()
    assert registry.resolve("a").digest == "d2"
    assert registry.release(old.adapter_id)
    assert not registry.infos(lambda _: Residency())[0].is_resident


def test_reload_of_an_idle_version_frees_it_at_once() -> None:
    registry = make_registry()
    old = load(registry, "a", "d1").version
    assert load(registry, "a", "d2").freed == (old.adapter_id,)


def test_reload_of_the_same_content_keeps_the_version_at_its_new_path() -> None:
    registry = make_registry()
    old = load(registry, "a").version
    registered = registry.ready("a", "moved", registry.begin_loading("a", "moved"), AdapterContent(facts()))
    assert registered is not None
    assert not registered.is_new
    assert registered.version.adapter_id == old.adapter_id
    assert registered.freed == ()
    assert registry.resolve("a").path == registry.version(old.adapter_id).path == "moved"


def test_other_conventions_are_for_new_requests_and_keep_the_bytes() -> None:
    registry = make_registry()
    old = load(registry, "a").version
    assert registry.infos(lambda _: Residency())[0].conventions == NO_CONVENTIONS
    registry.acquire(old.adapter_id)
    conventions, stamps = AdapterConventions("x", digest="c"), ((1, 2, 3, 4, 5),)
    content = AdapterContent(facts(), conventions, stamps)
    registered = registry.ready("a", "path", registry.begin_loading("a", "path"), content)
    assert registered is not None
    assert (registered.is_new, registered.freed) == (False, ())
    found = registry.resolve("a")
    assert (found.adapter_id, found.conventions) == (old.adapter_id, conventions)
    assert found.weights_stamps == stamps
    assert registry.infos(lambda _: Residency())[0].conventions == conventions
    assert not registry.release(old.adapter_id)
    check_invariants(registry)


def test_conventions_of_what_was_never_read_are_unknown() -> None:
    registry = make_registry()
    load_id = registry.begin_loading("a", "dir")
    registry.outlined("a", load_id, AdapterOutline(8, 9))
    assert registry.infos(lambda _: Residency())[0].conventions is None


def test_remove_drains() -> None:
    registry = make_registry()
    version = load(registry, "a").version
    registry.acquire(version.adapter_id)
    registry.acquire(version.adapter_id)
    assert registry.remove("a") == ()
    with pytest.raises(UnknownModelError, match="'a'"):
        registry.remove("a")
    with pytest.raises(AdapterUnavailableError, match="draining"):
        registry.resolve("a")
    assert registry.infos(lambda _: Residency())[0].state == "draining"
    assert not registry.release(version.adapter_id)
    assert registry.release(version.adapter_id)
    assert registry.infos(lambda _: Residency()) == ()
    with pytest.raises(UnknownModelError):
        registry.resolve("a")


def test_remove_frees_an_idle_version_at_once() -> None:
    registry = make_registry()
    version = load(registry, "a").version
    assert registry.remove("a") == (version.adapter_id,)


def test_a_name_that_is_removed_while_loading_ignores_the_end_of_the_load() -> None:
    registry = make_registry()
    load_id = registry.begin_loading("a", "dir")
    registry.remove("a")
    later = registry.begin_loading("a", "other")
    assert registry.ready("a", "dir", load_id, AdapterContent(facts())) is None
    registry.failed("a", load_id, "late")
    assert registry.infos(lambda _: Residency())[0].state == "loading"
    assert registry.ready("a", "other", later, AdapterContent(facts())) is not None


def test_one_load_per_name_at_a_time() -> None:
    registry = make_registry()
    registry.begin_loading("a", "dir")
    with pytest.raises(AdapterUnavailableError, match="'a' is loading"):
        registry.begin_loading("a", "dir")


def test_unknown_names_come_with_near_ones() -> None:
    registry = make_registry()
    load(registry, "summarise")
    with pytest.raises(UnknownModelError, match="'summary'; did you mean 'summarise'"):
        registry.resolve("summary")
    with pytest.raises(UnknownModelError, match="did you mean 'base'"):
        registry.resolve("bace")
    with pytest.raises(UnknownModelError, match="'zzz'; served are 'base', 'summarise'"):
        registry.remove("zzz")


def test_release_without_acquire_is_a_bug() -> None:
    registry = make_registry()
    version = load(registry, "a").version
    with pytest.raises(AssertionError):
        registry.release(version.adapter_id)


@pytest.mark.parametrize(
    "name",
    ["", " a", "a ", "a//b", "/a", "a/", "a/../b", "a/.", "a\\b", "base:a", "a\nb", "a\0", "x" * 257, "base"],
)
def test_names_that_are_refused(name: str) -> None:
    with pytest.raises(AdapterError, match="cannot be called"):
        check_adapter_name(name, ["base"])


@pytest.mark.parametrize(
    "name", ["a", "my adapter", "a.b-c_d", "été", "x" * 256, "1", "team/sql", "a/b/c@main"]
)
def test_names_that_are_allowed(name: str) -> None:
    check_adapter_name(name, ["base"])


class RegistryMachine(RuleBasedStateMachine):
    """Any order of loads, ends of loads, requests and removals.

    The model: which digest each name serves, and which versions a request may still use.
    """

    loads: Bundle[tuple[str, LoadId]] = Bundle("loads")
    requests: Bundle[AdapterId] = Bundle("requests")
    names = st.sampled_from(["a", "b"])

    def __init__(self) -> None:
        super().__init__()
        self.registry = make_registry()
        self.serves: dict[str, str] = {}
        self.loading: dict[str, LoadId] = {}
        self.alive: set[AdapterId] = set()  # made and not freed
        self.references: dict[AdapterId, int] = {}

    def forget(self, *freed: AdapterId) -> None:
        for adapter_id in freed:
            assert not self.references.get(adapter_id), "freed while a request refers to it"
            self.alive.remove(adapter_id)

    @rule(target=loads, name=names)
    def begin(self, name: str) -> tuple[str, LoadId]:
        if name in self.loading:
            with pytest.raises(AdapterUnavailableError):
                self.registry.begin_loading(name, "dir")
            return name, LoadId(-1)
        self.loading[name] = self.registry.begin_loading(name, "dir")
        return name, self.loading[name]

    @rule(load=consumes(loads), digest=st.sampled_from(["d1", "d2"]))
    def end_well(self, load: tuple[str, LoadId], digest: str) -> None:
        name, load_id = load
        registered = self.registry.ready(name, "dir", load_id, AdapterContent(facts(digest)))
        if self.loading.get(name) != load_id:
            assert registered is None
            return
        assert registered is not None
        del self.loading[name]
        assert registered.is_new == (self.serves.get(name) != digest)
        self.serves[name] = digest
        self.alive.add(registered.version.adapter_id)
        self.forget(*registered.freed)

    @rule(load=consumes(loads))
    def end_badly(self, load: tuple[str, LoadId]) -> None:
        name, load_id = load
        self.registry.failed(name, load_id, "why")
        if self.loading.get(name) == load_id:
            del self.loading[name]

    @rule(name=names)
    def remove(self, name: str) -> None:
        is_known = name in self.serves or name in self.loading
        self.serves.pop(name, None)
        self.loading.pop(name, None)
        try:
            self.forget(*self.registry.remove(name))
        except UnknownModelError:
            assert not is_known

    @precondition(lambda self: self.serves)
    @rule(target=requests, data=st.data())
    def start_request(self, data: st.DataObject) -> AdapterId:
        name = data.draw(st.sampled_from(sorted(self.serves)))
        version = self.registry.resolve(name)
        self.registry.acquire(version.adapter_id)
        self.references[version.adapter_id] = self.references.get(version.adapter_id, 0) + 1
        return version.adapter_id

    @rule(adapter_id=consumes(requests))
    def end_request(self, adapter_id: AdapterId) -> None:
        self.references[adapter_id] -= 1
        if self.registry.release(adapter_id):
            self.forget(adapter_id)

    @invariant()
    def serves_what_the_model_says(self) -> None:
        check_invariants(self.registry)
        for name in ("a", "b"):
            if name in self.serves:
                assert self.registry.resolve(name).digest == self.serves[name]
            else:
                with pytest.raises((AdapterUnavailableError, UnknownModelError)):
                    self.registry.resolve(name)

    @invariant()
    def keeps_exactly_what_serves_or_is_in_use(self) -> None:
        serving = {self.registry.resolve(name).adapter_id for name in self.serves}
        in_use = {adapter_id for adapter_id, number in self.references.items() if number}
        assert self.alive == serving | in_use


TestRegistryMachine = RegistryMachine.TestCase
TestRegistryMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)

"""The adapter manager: operations end exactly once, versions live as long as they are used."""

import os
import select
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pytest
from corun.runtime.adapter import AdapterFacts, AdapterOutline
from corun.runtime.adapters.content import AdapterContent
from corun.runtime.adapters.conventions import NO_CONVENTIONS, AdapterConventions
from corun.runtime.adapters.info import AdapterInfo
from corun.runtime.adapters.mix import LoRAMix
from corun.runtime.adapters.registry import AdapterVersion
from corun.runtime.adapters.resolved import AdapterPath
from corun.runtime.adapters.state_file import AdapterStateFile, RememberedAdapter
from corun.runtime.engine.adapter_manager import AdapterManager
from corun.runtime.engine.adapter_reading import MakeRoom
from corun.runtime.engine.messages import (
    AdaptersChanged,
    AddAdapter,
    OperationDone,
    PinAdapter,
    ReadAdapter,
    RemoveAdapter,
)
from corun.runtime.engine_state import Residency
from corun.runtime.errors import (
    AdapterChangedError,
    AdapterError,
    AdapterExistsError,
    AdapterFailedError,
    AdapterUnavailableError,
    CorunError,
    RequestError,
    UnknownModelError,
)
from corun.runtime.file_calls import FILES
from corun.runtime.memory.loads import HostRoom
from corun.runtime.memory.report import Changed
from corun.runtime.plan import AdapterId, HostPlace, HostPlaceId


class FakeDevice:
    """Records dropped versions; knows resident ones."""

    def __init__(self) -> None:
        self.dropped: list[AdapterId] = []
        self.resident: set[AdapterId] = set()
        self.changed = Changed(set(), set())
        self.places: dict[HostPlaceId, str | None] = {}  # with their contents
        self.forgotten: list[str] = []
        self.pinned: dict[AdapterId, int] = {}  # bytes
        self.ready: dict[AdapterId, int] = {}  # bytes
        self.most_pinned_bytes = 250

    def check_pin(self, num_bytes: int, other_bytes: int, replaced: AdapterId | None) -> None:
        self.other_bytes = other_bytes
        taken = {key: size for key, size in self.pinned.items() if key != replaced}
        if sum(taken.values()) + num_bytes > self.most_pinned_bytes:
            raise RequestError("no room", param="pinned")

    def pin_adapter(self, adapter_id: AdapterId, facts: AdapterFacts) -> None:
        self.pinned[adapter_id] = facts.num_bytes

    def adapter_ready(self, adapter_id: AdapterId, facts: AdapterFacts) -> None:
        self.ready[adapter_id] = facts.num_bytes

    def unpin_adapter(self, adapter_id: AdapterId) -> None:
        self.pinned.pop(adapter_id, None)

    def drop_adapter(self, adapter_id: AdapterId) -> None:
        self.dropped.append(adapter_id)

    def take_changed_adapters(self) -> Changed:
        changed, self.changed = self.changed, Changed(set(), set())
        return changed

    def residency(self, version: AdapterVersion) -> Residency:
        return Residency(level="device" if version.adapter_id in self.resident else "disk")

    def place_registration(self, layer_bytes: Sequence[int]) -> HostRoom:
        assert threading.current_thread() is threading.main_thread()
        place_id = HostPlaceId(len(self.places) + 1)
        self.places[place_id] = "being read"
        return HostRoom(HostPlace(place_id, ((0, sum(layer_bytes)),), False), (HostPlaceId(99),))

    def end_registration(self, place_id: HostPlaceId, digest: str | None) -> None:
        assert self.places[place_id] == "being read"
        self.places[place_id] = digest

    def drop_content(self, digest: str) -> None:
        self.forgotten.append(digest)


class Files:
    """Stands for adapter directories: path -> digest, or an error; and for the host's memory."""

    def __init__(self) -> None:
        self.content: dict[str, str | Exception] = {}
        self.gone: list[str] = []  # content that no version has any more
        self.refused: set[str] = set()  # paths of which the header is bad
        self.num_reads = 0
        self.kept: set[str] = set()  # paths for which there is room
        self.begun: set[str] = set()  # paths of which the first load reads the values
        self.conventions: dict[str, AdapterConventions] = {}
        self.known: AdapterVersion | None = None  # of the last read
        self.evicted: list[HostPlaceId] = []
        self.read_on: set[int] = set()  # CPUs on which the last one may have been read
        self.gate = threading.Event()
        self.gate.set()

    def outline(self, path: AdapterPath) -> AdapterOutline:
        assert path in self.content, path
        if path in self.refused:
            raise AdapterError("bad header")
        return AdapterOutline(rank=8, num_bytes=100)

    def begin(self, path: AdapterPath) -> AdapterContent | None:
        if path not in self.begun:
            return None
        facts = AdapterFacts(digest=f"stands for {path}", rank=8, num_bytes=100)
        return AdapterContent(facts, self.conventions.get(str(path), NO_CONVENTIONS), is_read=False)

    def read(self, path: AdapterPath, make_room: MakeRoom, known: AdapterVersion | None) -> AdapterContent:
        self.num_reads += 1
        self.known = known
        self.read_on = os.sched_getaffinity(0)
        assert self.gate.wait(10)
        content = self.content[str(path)]
        place = make_room((60, 40)) if path in self.kept else None
        if isinstance(content, Exception):
            raise content
        facts = AdapterFacts(digest=content, rank=8, num_bytes=100)
        conventions = self.conventions.get(str(path), NO_CONVENTIONS)
        return AdapterContent(facts, conventions, is_kept=place is not None)

    def evict(self, place_ids: Iterable[HostPlaceId]) -> None:
        self.evicted += place_ids

    def remove_content(self, digest: str) -> None:
        self.gone.append(digest)


@pytest.fixture
def files() -> Files:
    return Files()


@pytest.fixture
def device() -> FakeDevice:
    return FakeDevice()


@pytest.fixture
def manager(files: Files, device: FakeDevice) -> Iterator[AdapterManager]:
    manager = AdapterManager(files, (), files)
    manager.attach(device)
    yield manager
    manager.close()


def wait_done(manager: AdapterManager) -> tuple[OperationDone, AdaptersChanged | None]:
    """Poll as the loop does until an operation has ended."""
    changed = None
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        for message in manager.poll():
            if isinstance(message, OperationDone):
                return message, changed
            changed = message
        select.select([manager], [], [], 1.0)
    raise AssertionError("the operation did not end")


def add(
    manager: AdapterManager, files: Files, digest: str | Exception, path: str = "/a"
) -> tuple[OperationDone, AdaptersChanged | None]:
    files.content[path] = digest
    manager.handle(AddAdapter(7, "a", path))
    return wait_done(manager)


def remove(manager: AdapterManager, name: str) -> None:
    """Unregister an unused adapter, and let it leave the device."""
    adapter_id = manager.resolve(name).adapter_id
    manager.handle(RemoveAdapter(9, name))
    assert wait_done(manager)[0] == OperationDone(9)
    manager.remove_version(adapter_id)


def test_adds_an_adapter_and_tells(manager: AdapterManager, files: Files) -> None:
    done, changed = add(manager, files, "d1")
    assert done == OperationDone(7)
    assert changed is not None
    assert [(a.name, a.state, a.version) for a in changed.adapters] == [("a", "ready", "d1")]
    assert manager.resolve("a").digest == "d1"


def test_says_loading_while_files_are_read(manager: AdapterManager, files: Files) -> None:
    files.gate.clear()
    files.content["/a"] = "d1"
    manager.handle(AddAdapter(7, "a", "/a"))
    (changed,) = manager.poll()
    assert isinstance(changed, AdaptersChanged)
    assert changed.adapters[0].state == "loading"
    with pytest.raises(AdapterUnavailableError, match="loading"):
        manager.resolve("a")
    files.gate.set()
    assert wait_done(manager)[0].error is None


@pytest.mark.parametrize("error", [AdapterError("bad rank"), ZeroDivisionError("a bug")])
def test_a_failure_is_told_and_kept(manager: AdapterManager, files: Files, error: Exception) -> None:
    done, changed = add(manager, files, error)
    assert done.error_kind == "AdapterError"
    assert str(error) in (done.error or "")
    assert changed is not None
    assert changed.adapters[0].state == "failed"
    with pytest.raises(AdapterUnavailableError, match=str(error)):
        manager.resolve("a")
    assert add(manager, files, "d1")[0].error is None  # and the thread has survived


def test_a_reload_drains_the_old_version(manager: AdapterManager, files: Files, device: FakeDevice) -> None:
    add(manager, files, "d1")
    old = manager.resolve("a").adapter_id
    manager.acquire(old)
    add(manager, files, "d2")
    new = manager.resolve("a").adapter_id
    assert new != old
    assert device.dropped == []
    assert manager.version(old).digest == "d1"
    assert manager.release(old)
    manager.remove_version(old)
    with pytest.raises(KeyError):
        manager.version(old)


def test_the_same_content_stays_the_same_version(
    manager: AdapterManager, files: Files, device: FakeDevice
) -> None:
    add(manager, files, "d1")
    version = manager.resolve("a").adapter_id
    add(manager, files, "d1", path="/elsewhere")
    assert manager.resolve("a").adapter_id == version
    assert device.dropped == []


def pinned(manager: AdapterManager) -> dict[str, bool]:
    manager.poll()
    return {info.name: info.pinned for info in manager.infos()}


def pin(manager: AdapterManager, name: str, *, is_pinned: bool = True) -> None:
    manager.handle(PinAdapter(8, name, is_pinned))
    done, changed = wait_done(manager)
    assert done == OperationDone(8)
    assert changed is None or pinned(manager)[name] == is_pinned


def test_a_name_is_pinned_whatever_its_version(
    manager: AdapterManager, files: Files, device: FakeDevice
) -> None:
    add(manager, files, "d1")
    pin(manager, "a")
    old_id = manager.resolve("a").adapter_id
    assert device.pinned == device.ready == {old_id: 100}
    manager.acquire(old_id)
    add(manager, files, "d2", path="/b")
    assert device.pinned == {manager.resolve("a").adapter_id: 100}, "the old one only drains"
    assert manager.release(old_id)
    manager.handle(AddAdapter(7, "a", "/b", pinned=False))
    assert wait_done(manager)[0] == OperationDone(7)
    assert device.pinned == {} and pinned(manager) == {"a": False}
    pin(manager, "a")
    manager.acquire(manager.resolve("a").adapter_id)
    manager.handle(RemoveAdapter(9, "a"))
    assert device.pinned == {}, "its remaining requests do not need it pinned"


def test_what_does_not_fit_is_not_pinned_and_changes_nothing(
    manager: AdapterManager, files: Files, device: FakeDevice
) -> None:
    device.most_pinned_bytes = 100
    files.content.update({"/a": "d1", "/b": "d2"})
    manager.handle(AddAdapter(7, "a", "/a", pinned=True))
    assert wait_done(manager)[0] == OperationDone(7)
    manager.handle(AddAdapter(8, "b", "/b", pinned=True))
    done, _ = wait_done(manager)
    assert (done.error, done.error_kind) == ("no room", "RequestError")
    with pytest.raises(AdapterUnavailableError, match="no room"):
        manager.resolve("b")
    assert device.other_bytes == 0
    add(manager, files, "d3", path="/c")
    assert manager.resolve("a").digest == "d3", "it takes the place of its old version"
    device.most_pinned_bytes = 50
    done, _ = add(manager, files, "d4", path="/d")
    assert done.error == "no room"
    assert manager.resolve("a").digest == "d3" and pinned(manager)["a"]
    files.content["/b"] = "d2"
    manager.handle(AddAdapter(9, "b", "/b"))
    assert wait_done(manager)[0] == OperationDone(9)
    with pytest.raises(RequestError, match="no room"):
        manager.handle(PinAdapter(10, "b", True))
    with pytest.raises(UnknownModelError):
        manager.handle(PinAdapter(11, "c", True))
    assert pinned(manager) == {"a": True, "b": False}
    pin(manager, "a", is_pinned=False)
    device.most_pinned_bytes = 100
    pin(manager, "a")
    assert device.other_bytes == 100, "what requests for the other may need"


def test_removal(manager: AdapterManager, files: Files, device: FakeDevice) -> None:
    add(manager, files, "d1")
    version = manager.resolve("a").adapter_id
    manager.handle(RemoveAdapter(8, "a"))
    done, changed = wait_done(manager)
    assert done == OperationDone(8)
    assert changed is not None and changed.adapters == ()
    assert device.dropped == [version]
    with pytest.raises(UnknownModelError):
        manager.handle(RemoveAdapter(9, "a"))


def test_removal_while_loading_ends_both_operations(manager: AdapterManager, files: Files) -> None:
    files.gate.clear()
    files.content["/a"] = "d1"
    manager.handle(AddAdapter(1, "a", "/a"))
    manager.handle(RemoveAdapter(2, "a"))
    assert wait_done(manager)[0] == OperationDone(2)
    files.gate.set()
    done, _ = wait_done(manager)
    assert done.operation_id == 1
    assert "removed while" in (done.error or "")
    assert files.gone == ["d1"]


def test_tells_of_content_that_no_version_has_any_more(manager: AdapterManager, files: Files) -> None:
    add(manager, files, "d1")
    first = manager.resolve("a").adapter_id
    files.content["/b"] = "d1"
    manager.handle(AddAdapter(8, "b", "/b"))
    wait_done(manager)
    add(manager, files, "d2")
    manager.remove_version(first)
    assert files.gone == [], "another name has the same content"
    remove(manager, "b")
    remove(manager, "a")
    assert files.gone == ["d1", "d2"]


def test_content_that_is_being_read_again_is_not_gone(manager: AdapterManager, files: Files) -> None:
    """The host has it since the read, and must keep it until the read is complete."""
    add(manager, files, "d1")
    first = manager.resolve("a").adapter_id
    manager.handle(RemoveAdapter(2, "a"))
    assert wait_done(manager)[0] == OperationDone(2)
    files.content["/b"] = "d1"
    manager.handle(AddAdapter(3, "b", "/b"))
    assert select.select([manager], [], [], 10)[0]  # read, and not complete
    manager.remove_version(first)
    assert files.gone == []
    assert wait_done(manager)[0] == OperationDone(3)
    assert files.gone == []
    remove(manager, "b")
    assert files.gone == ["d1"]


def test_tells_what_has_become_resident_and_nothing_else(
    manager: AdapterManager, files: Files, device: FakeDevice
) -> None:
    add(manager, files, "d1")
    assert manager.poll() == []
    files.content["/b"] = "d2"
    manager.handle(AddAdapter(8, "b", "/b"))
    wait_done(manager)
    adapter_id = manager.resolve("a").adapter_id
    device.resident.add(adapter_id)
    assert manager.poll() == [], "nothing has been marked as changed"
    device.changed.adapter_ids.add(adapter_id)
    assert manager.poll(is_due=False) == []
    (changed,) = manager.poll()
    assert isinstance(changed, AdaptersChanged)
    assert [(info.name, info.is_resident) for info in changed.adapters] == [("a", True)]
    device.changed.digests.add("d2")
    assert manager.poll() == [], "it is where it was"
    remove(manager, "b")
    assert manager.poll() == []


def test_other_conventions_are_told_at_once_and_drop_nothing(
    manager: AdapterManager, files: Files, device: FakeDevice
) -> None:
    add(manager, files, "d1")
    version = manager.resolve("a")
    manager.acquire(version.adapter_id)
    files.conventions["/a"] = AdapterConventions("x", digest="c")
    changed = add(manager, files, "d1")[1]
    assert files.known == version
    assert changed is not None
    assert [one.conventions for one in changed.adapters] == [files.conventions["/a"]]
    assert manager.resolve("a").adapter_id == version.adapter_id
    assert (device.dropped, files.gone) == ([], [])
    files.content["/b"] = "d1"
    manager.handle(AddAdapter(9, "a", "/b", replaces=False))
    done, _ = wait_done(manager)
    assert done.error_kind == AdapterExistsError.__name__  # the same weights without a template
    assert files.known is None  # which were read elsewhere


def test_one_folder_under_two_names(manager: AdapterManager, files: Files) -> None:
    files.conventions["/a"] = AdapterConventions("x", digest="c")
    add(manager, files, "d1")
    manager.handle(AddAdapter(8, "b", "/a"))
    assert wait_done(manager)[0].error is None
    files.conventions["/a"] = AdapterConventions("y", digest="d")
    add(manager, files, "d1")
    found = {info.name: info.conventions for info in manager.infos()}
    assert {name: one and one.template for name, one in found.items()} == {"a": "y", "b": "x"}


def test_files_are_read_when_they_are_asked_for_and_once(manager: AdapterManager, files: Files) -> None:
    files.content["/a"], files.conventions["/a"] = "d1", AdapterConventions("x", digest="c")
    manager.add_unread("a", "/a")
    assert manager.infos()[0].conventions is None
    manager.handle(ReadAdapter(1, "a"))
    manager.handle(ReadAdapter(2, "a"))
    told: list[OperationDone | AdaptersChanged] = []
    deadline_s = time.monotonic() + 30
    while OperationDone(2) not in told and time.monotonic() < deadline_s:
        told += manager.poll(is_due=False)
        select.select([manager], [], [], 1.0)
    conventions = [
        one.conventions
        for message in told
        if isinstance(message, AdaptersChanged)
        for one in message.adapters
    ]
    assert conventions[-1] == files.conventions["/a"]
    assert [one for one in told if isinstance(one, OperationDone)] == [OperationDone(1), OperationDone(2)]
    assert files.num_reads == 1
    manager.handle(ReadAdapter(3, "a"))
    assert wait_done(manager)[0] == OperationDone(3)
    manager.handle(ReadAdapter(4, "nobody"))
    assert wait_done(manager)[0] == OperationDone(4)  # the next request gets the error
    files.content["/b"] = AdapterError("bad values")
    manager.add_unread("b", "/b")
    manager.handle(ReadAdapter(5, "b"))
    assert wait_done(manager)[0].error == "bad values"


def test_what_requests_are_made_with_is_told_before_it_is_due(manager: AdapterManager, files: Files) -> None:
    files.content["/a"] = "d1"
    manager.add_unread("a", "/a")
    assert manager.must_wait("a")
    deadline_s = time.monotonic() + 30
    told: list[OperationDone | AdaptersChanged] = []
    while not told and time.monotonic() < deadline_s:
        select.select([manager], [], [], 1.0)
        told = manager.poll(is_due=False)
    (changed,) = told
    assert isinstance(changed, AdaptersChanged)
    assert changed.adapters[0].conventions == NO_CONVENTIONS


def test_add_now_raises_with_the_name(manager: AdapterManager, files: Files) -> None:
    files.content["/a"] = AdapterError("bad rank")
    with pytest.raises(AdapterError, match="'a': bad rank"):
        manager.add_now("a", "/a")


def begin(manager: AdapterManager, files: Files, content: str | Exception) -> AdapterVersion:
    """Register /a as ``a``, and begin its first use."""
    files.content["/a"] = content
    files.begun.add("/a")
    manager.add_unread("a", "/a")
    num_reads = files.num_reads
    wait_read(manager, "a")
    assert files.num_reads == num_reads
    return manager.resolve("a")


def test_a_version_is_named_once_its_first_load_has_read_it(manager: AdapterManager, files: Files) -> None:
    version = begin(manager, files, "d1")
    assert version.label == version.content == "" != version.digest
    (info,) = manager.infos()
    assert (info.state, info.version, info.conventions) == ("ready", "", NO_CONVENTIONS)
    manager.acquire(version.adapter_id)
    manager.first_read_ended(version.digest, "d1")
    assert manager.label(version.adapter_id) == "d1"
    assert manager.resolve("a").digest == version.digest
    assert changes(manager)[0].version == "d1"
    add(manager, files, "d1")  # the same content
    assert manager.resolve("a").adapter_id == version.adapter_id
    manager.poll()
    assert files.gone == ["d1"]  # loads look for what stands for it
    add(manager, files, "d2")
    assert manager.resolve("a").adapter_id != version.adapter_id


def test_what_the_first_load_cannot_read_has_failed(
    manager: AdapterManager, files: Files, device: FakeDevice
) -> None:
    version = begin(manager, files, "d1")
    manager.acquire(version.adapter_id)
    manager.first_read_ended(version.digest, AdapterError("not finite"))
    assert [(one.state, one.reason) for one in changes(manager)] == [("failed", "not finite")]
    with pytest.raises(AdapterFailedError, match="not finite"):
        manager.resolve("a")
    assert not manager.must_wait("a")
    assert manager.release(version.adapter_id)  # with its last request
    assert device.dropped == []
    manager.remove_version(version.adapter_id)
    assert files.gone == [version.digest]
    add(manager, files, "d1")
    assert manager.resolve("a").content == "d1"


def test_files_that_changed_before_their_first_load_are_begun_again(
    manager: AdapterManager, files: Files
) -> None:
    begun = begin(manager, files, "d1")
    manager.acquire(begun.adapter_id)
    manager.first_read_ended(begun.digest, AdapterChangedError("changed"))
    assert [(one.state, one.reason, one.version) for one in changes(manager)] == [("ready", None, "")]
    wait_read(manager, "a")
    again = manager.resolve("a")
    assert again.adapter_id != begun.adapter_id and files.num_reads == 0
    assert manager.release(begun.adapter_id)


def test_a_mix_and_a_pin_need_values_that_no_load_has_read(manager: AdapterManager, files: Files) -> None:
    begun = begin(manager, files, "d1")
    wait_read(manager, LoRAMix([("a", 0.5)]).lora_name)
    read = manager.resolve("a")
    assert (read.content, files.num_reads) == ("d1", 2)
    assert read.adapter_id != begun.adapter_id
    remove(manager, "a")
    begin(manager, files, "d1")
    pin(manager, "a")
    assert manager.resolve("a").content == "d1" and pinned(manager) == {"a": True}


@pytest.mark.parametrize("error", [AdapterError("not finite"), AdapterUnavailableError("no answer")])
def test_a_mix_of_values_that_cannot_be_read_is_refused(
    manager: AdapterManager, files: Files, error: CorunError
) -> None:
    begun = begin(manager, files, error)
    mix = LoRAMix([("a", 0.5)]).lora_name
    wait_read(manager, mix)
    with pytest.raises(AdapterFailedError, match=str(error)):
        manager.resolve(mix)
    assert not manager.must_wait(mix) and files.num_reads == 1
    manager.remove_version(begun.adapter_id)
    assert files.gone == [begun.digest]


def test_a_pin_without_room_ends_no_version(
    manager: AdapterManager, files: Files, device: FakeDevice
) -> None:
    begun = begin(manager, files, "d1")
    device.most_pinned_bytes = 99
    manager.handle(PinAdapter(7, "a", pinned=True))
    assert wait_done(manager)[0].error == "no room"
    assert manager.resolve("a") is begun


def changes(manager: AdapterManager) -> list[AdapterInfo]:
    """What is published now."""
    return [info for one in manager.poll() if isinstance(one, AdaptersChanged) for info in one.adapters]


def wait_read(manager: AdapterManager, name: str) -> None:
    """Poll as the loop does until no request must wait for ``name``."""
    deadline = time.monotonic() + 30
    while manager.must_wait(name):
        assert time.monotonic() < deadline
        select.select([manager], [], [], 1.0)
        for message in manager.poll():
            assert isinstance(message, AdaptersChanged), "no operation was requested"


def test_files_are_read_when_they_are_first_asked_for(manager: AdapterManager, files: Files) -> None:
    files.content["/a"] = "d1"
    manager.add_unread("a", "/a")
    assert files.num_reads == 0
    assert [(one.state, one.version) for one in manager.infos()] == [("ready", "")]
    files.content["/a"] = "d2"  # the earlier content was never read
    assert manager.must_wait("a") and manager.must_wait("a")
    wait_read(manager, "a")
    assert files.num_reads == 1
    assert manager.resolve("a").digest == "d2"
    assert not manager.must_wait("nobody")


def test_bad_files_fail_where_they_are_seen_and_leave_others_alone(
    manager: AdapterManager, files: Files
) -> None:
    files.content |= {"/a": "d1", "/b": AdapterError("not a number"), "/c": "d3"}
    files.refused.add("/a")
    with pytest.raises(AdapterError, match="adapter 'a': bad header"):
        manager.add_unread("a", "/a")
    manager.add_unread("b", "/b")
    manager.add_unread("c", "/c")
    wait_read(manager, "b")
    wait_read(manager, "c")
    for name, reason in (("a", "bad header"), ("b", "not a number")):
        with pytest.raises(AdapterFailedError, match=reason):
            manager.resolve(name)
    assert manager.resolve("c").digest == "d3"


def test_what_is_to_be_pinned_is_read(manager: AdapterManager, files: Files, device: FakeDevice) -> None:
    files.content["/a"] = "d1"
    manager.add_unread("a", "/a")
    manager.handle(PinAdapter(7, "a", pinned=True))
    assert wait_done(manager)[0] == OperationDone(7)
    assert device.pinned == {manager.resolve("a").adapter_id: 100}


def test_a_name_that_is_removed_while_it_is_first_read_holds_nobody(
    manager: AdapterManager, files: Files
) -> None:
    files.content["/a"] = "d1"
    files.gate.clear()
    manager.add_unread("a", "/a")
    assert manager.must_wait("a")
    manager.handle(RemoveAdapter(9, "a"))
    assert not manager.must_wait("a")
    files.gate.set()
    assert wait_done(manager)[0] == OperationDone(9)


def test_the_same_content_may_be_added_again_and_other_content_only_in_place(
    manager: AdapterManager, files: Files
) -> None:
    add(manager, files, "d1")
    files.content |= {"/same": "d1", "/other": "d2"}
    manager.handle(AddAdapter(8, "a", "/same", replaces=False))
    assert wait_done(manager)[0] == OperationDone(8)
    manager.handle(AddAdapter(9, "a", "/other", replaces=False))
    assert wait_done(manager)[0].error_kind == "AdapterExistsError"
    assert manager.resolve("a").digest == "d1"
    manager.handle(AddAdapter(10, "a", "/other"))
    assert wait_done(manager)[0] == OperationDone(10)
    assert manager.resolve("a").digest == "d2"


def test_what_was_not_read_is_the_same_only_where_it_lies(manager: AdapterManager, files: Files) -> None:
    files.content |= {"/a": "d1", "/other": "d1"}
    manager.add_unread("a", "/a")
    with pytest.raises(AdapterExistsError, match="load_inplace"):
        manager.handle(AddAdapter(8, "a", "/other", replaces=False))
    manager.handle(AddAdapter(9, "a", "/a", replaces=False))
    assert wait_done(manager)[0] == OperationDone(9)


def test_what_is_asked_while_a_name_is_being_read_comes_after(manager: AdapterManager, files: Files) -> None:
    files.content |= {"/a": "d1", "/b": "d2", "/c": AdapterError("bad")}
    manager.add_unread("a", "/a")
    files.gate.clear()
    assert manager.must_wait("a")  # for a request
    manager.handle(AddAdapter(7, "a", "/b"))
    manager.handle(AddAdapter(8, "a", "/c"))
    manager.handle(AddAdapter(9, "a", "/a", replaces=False))
    assert not [one for one in manager.poll() if isinstance(one, OperationDone)]
    files.gate.set()
    assert wait_done(manager)[0] == OperationDone(7)
    assert wait_done(manager)[0].operation_id == 8
    assert wait_done(manager)[0].error_kind == "AdapterExistsError"
    assert manager.resolve("a").digest == "d2"
    assert not manager.must_wait("a")


def test_what_operations_load_is_remembered(files: Files, device: FakeDevice, tmp_path: Path) -> None:
    state = AdapterStateFile(tmp_path / "state.json")
    manager = AdapterManager(files, (), files, state)
    manager.attach(device)
    files.content |= {f"/{name}": f"d-{name}" for name in "abcd"}
    manager.add_now("a", "/a")  # of the options
    manager.add_unread("b", "/b")
    assert manager.must_wait("b")
    wait_read(manager, "b")
    for number, name in enumerate("cd"):
        manager.handle(AddAdapter(number, name, f"/{name}"))
        assert wait_done(manager)[0].error is None
    manager.handle(PinAdapter(3, "d", pinned=True))
    manager.handle(RemoveAdapter(4, "c"))
    manager.close()
    assert AdapterStateFile(tmp_path / "state.json").adapters == (RememberedAdapter("d", "/d", True),)


def test_an_operation_ends_when_the_file_is_on_disk(
    files: Files, device: FakeDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on, fsync = threading.Event(), os.fsync

    def slow(descriptor: int) -> None:
        assert goes_on.wait(10.0)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", slow)
    manager = AdapterManager(files, (), files, AdapterStateFile(tmp_path / "state.json"))
    manager.attach(device)
    files.content["/a"] = "d1"
    manager.handle(AddAdapter(7, "a", "/a"))
    while manager.must_wait("a") or manager.infos()[0].state != "ready":
        assert not [one for one in manager.poll() if isinstance(one, OperationDone)]
    assert manager.resolve("a").digest == "d1"  # it serves already
    goes_on.set()
    assert wait_done(manager)[0] == OperationDone(7)
    assert [one.name for one in AdapterStateFile(tmp_path / "state.json").adapters] == ["a"]
    manager.close()


def test_closing_reads_no_further_file(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    files.gate.clear()
    files.content.update({f"/{number}": "d" for number in range(5)})
    manager = AdapterManager(files, (), files)
    for number in range(5):
        manager.handle(AddAdapter(number, f"name-{number}", f"/{number}"))
    while not files.num_reads:
        time.sleep(0.001)
    join = threading.Thread.join

    def opening(thread: threading.Thread, timeout: float | None = None) -> None:
        files.gate.set()  # the close waits from here on
        join(thread, timeout)

    monkeypatch.setattr(threading.Thread, "join", opening)
    manager.close()
    manager.close()
    assert files.num_reads == 1


def test_files_are_read_beside_the_engine(files: Files, device: FakeDevice) -> None:
    here = os.sched_getaffinity(0)
    manager = AdapterManager(files, (), files, background_cpus=(max(here),))
    manager.attach(device)
    assert add(manager, files, "d1")[0].error is None
    assert files.read_on == {max(here)}
    manager.close()
    assert os.sched_getaffinity(0) == here


def test_room_on_the_host_is_made_by_the_engines_thread(
    manager: AdapterManager, files: Files, device: FakeDevice
) -> None:
    """Evictions for it happen before anything is read."""
    files.kept = {"/a", "/b", "/c"}
    files.content = {"/a": "d1", "/b": AdapterError("bad rank"), "/c": "d2"}
    manager.handle(AddAdapter(1, "a", "/a"))
    assert wait_done(manager)[0].error is None
    assert device.places == {1: "d1"} and files.evicted == [99]
    manager.handle(AddAdapter(2, "b", "/b"))
    assert wait_done(manager)[0].error == "bad rank"
    assert device.places == {1: "d1", 2: None}
    manager.add_now("c", "/c")
    assert device.places == {1: "d1", 2: None, 3: "d2"}


def test_closing_while_an_adapter_waits_for_room(files: Files, device: FakeDevice) -> None:
    files.kept, files.content = {"/a"}, {"/a": "d1"}
    manager = AdapterManager(files, (), files)
    manager.attach(device)
    manager.handle(AddAdapter(1, "a", "/a"))
    select.select([manager], [], [], 10.0)  # it has asked
    manager.close()
    assert device.places == {}


def test_what_did_not_answer_is_read_again_once_it_does(
    manager: AdapterManager, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent = {"/a", "/b"}
    monkeypatch.setattr(FILES, "is_silent", silent.__contains__)
    files.content |= {"/a": AdapterError("no answer"), "/b": AdapterError("no answer")}
    for number, name in enumerate("ab"):
        manager.handle(AddAdapter(number, name, f"/{name}"))
        assert wait_done(manager)[0].error == "no answer"
    manager.handle(AddAdapter(2, "a", "/a"))  # a second attempt adds no second reading
    assert wait_done(manager)[0].error == "no answer"
    num_reads = files.num_reads
    manager.poll()
    assert files.num_reads == num_reads  # it does not answer yet
    manager.handle(RemoveAdapter(3, "b"))
    assert wait_done(manager)[0] == OperationDone(3)
    files.content |= {"/a": "d1", "/b": "d2"}
    silent.clear()
    manager.poll()
    wait_read(manager, "a")
    assert manager.resolve("a").digest == "d1"
    assert files.num_reads == num_reads + 1
    with pytest.raises(UnknownModelError):
        manager.resolve("b")

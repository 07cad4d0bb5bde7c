"""Reading an adapter's files into the arena while its first layers are used."""

import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from corun.gpu.adapters import arrival as arrival_module
from corun.gpu.adapters.arrival import Copied
from corun.gpu.adapters.loader import AdapterLoader, LoadedAdapter
from corun.gpu.adapters.store import HostAdapter
from corun.gpu.device.cpu import CpuDevice
from corun.runtime.adapters.digest import LateDigests
from corun.runtime.errors import AdapterChangedError, AdapterError, ResourceError
from corun.runtime.file_calls import FILES, SilentError
from corun.runtime.plan import AdapterId, AdapterTransfer, TransferId
from corun.shm.arena import ArenaEntry, HostArena
from corun.shm.errors import SpaceError
from support.gated_files import FileGate
from support.host_adapters import Host, copied, shared
from support.invariants import check_invariants
from support.peft_adapters import edit_tensors, save_adapter
from support.worker_pool import wait_until

TIMEOUT_S = 30.0


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("adapters")
    save_adapter(directory / "a", target_modules=["q_proj", "v_proj", "up_proj"])
    return directory / "a"


class Reading:
    """A host that reads files in a thread, under the test's control."""

    def __init__(self, path: Path) -> None:
        self.device = CpuDevice()
        self.gate = FileGate()
        self.host = Host(self.device, copied(1 << 20), gate=self.gate)
        self.path = path
        self.store = self.host.adapters.store
        self.digest = self.host.register(path).digest
        self.thread: threading.Thread | None = None
        self.num_told = 0
        self.is_wanted = True

    def evict(self) -> None:
        self.host.evict_idle()
        assert self.host.arena.taken_bytes == 0

    def begin(self) -> HostAdapter:
        """Read with the gate closed."""
        self.evict()
        self.gate.close()
        host = self.fetch()
        self.thread = threading.Thread(target=host.read, args=(self._note, lambda: self.is_wanted))
        self.thread.start()
        return host

    def fetch(self) -> HostAdapter:
        return self.store.fetch(self.digest, str(self.path), self.host.place(self.digest))

    def let_go(self, host: HostAdapter, *, has_failed: bool = False) -> None:
        host.release()
        self.host.end_load(self.digest, has_failed=has_failed)

    def end(self) -> None:
        assert self.thread is not None
        self.gate.open()
        self.thread.join(TIMEOUT_S)
        assert not self.thread.is_alive()

    def _note(self) -> None:
        self.num_told += 1


def loaded(loader: AdapterLoader) -> LoadedAdapter:
    """The end of the only load."""
    deadline_s = time.monotonic() + TIMEOUT_S
    while True:
        for event in loader.take_events():
            if isinstance(event, LoadedAdapter):
                return event
        assert time.monotonic() < deadline_s, "it does not end"


@pytest.fixture
def reading(files: Path, tmp_path: Path) -> Iterator[Reading]:
    reading = Reading(Path(shutil.copytree(files, tmp_path / "a")))
    yield reading
    reading.end()
    check_invariants(reading.host.arena)
    assert reading.host.arena.num_references == 0
    reading.device.close(timeout_s=TIMEOUT_S)


def parts_of(host: HostAdapter) -> list[bytes]:
    numbers = range(len(host.places))
    return [host.bytes_of(number, number + 1).numpy().tobytes() for number in numbers]


def test_the_first_layer_can_be_used_before_the_second_is_read(reading: Reading) -> None:
    present = reading.fetch()
    wanted = parts_of(present)
    reading.let_go(present)

    host = reading.begin()
    num_first = sum(place.layer == 0 for place in host.places)
    assert host.num_whole == 0
    reading.gate.let(4 + 1)  # of six tensors
    assert not host.wait_whole(1, timeout_s=0.01)
    reading.gate.let(1)
    assert host.wait_whole(num_first, TIMEOUT_S)
    assert host.num_whole == num_first < len(host.places)
    assert parts_of(host)[:num_first] == wanted[:num_first]
    assert not host.is_read
    assert not reading.host.cache.contains(reading.digest), "nobody finds what is not whole"
    reading.end()
    assert host.is_read and host.error is None
    assert parts_of(host) == wanted
    assert reading.num_told == 3, "at each layer and at the end"
    reading.let_go(host)
    again = reading.fetch()
    assert again.is_read
    reading.let_go(again)


def test_a_late_layer_that_has_changed(reading: Reading) -> None:
    edit_tensors(reading.path, layers__1__mlp__up_proj__lora_B=lambda tensor: tensor + 1)
    host = reading.begin()
    num_first = sum(place.layer == 0 for place in host.places)
    reading.end()
    assert host.num_whole == num_first, "what was found to be right may be used"
    assert not host.wait_whole(len(host.places), TIMEOUT_S)
    assert isinstance(host.error, AdapterError)
    assert "have changed since the adapter was registered" in str(host.error)
    assert reading.host.arena.taken_bytes > 0, "somebody may still read it"
    reading.let_go(host, has_failed=True)
    assert reading.host.arena.taken_bytes == 0
    assert not reading.host.cache.contains(reading.digest)


def test_a_file_that_is_cut_while_it_is_read(reading: Reading) -> None:
    host = reading.begin()
    reading.gate.let(1)  # of the first layer: tensors of a layer are read before any of them is taken
    wait_until(lambda: reading.gate.num_taken == 1)
    path = reading.path / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:600])
    reading.end()
    assert "changed while it was read" in str(host.error)
    reading.let_go(host, has_failed=True)
    assert reading.host.arena.taken_bytes == 0


@pytest.mark.parametrize("is_released", [False, True])
def test_what_nobody_waits_for_is_not_read_to_its_end(reading: Reading, is_released: bool) -> None:
    host = reading.begin()
    reading.gate.let(7)
    assert host.wait_whole(1, TIMEOUT_S)
    if is_released:
        host.release()
    reading.is_wanted = is_released
    reading.end()
    reading.let_go(host, has_failed=True)
    assert reading.gate.num_taken <= 8
    assert "the load was cancelled" in str(host.error)
    assert reading.host.arena.taken_bytes == 0


def test_the_same_content_is_registered_while_it_is_read(reading: Reading) -> None:
    """Both are whole; the one that came first is found, the other goes with its user."""
    host = reading.begin()
    reading.gate.let(6)
    assert host.wait_whole(1, TIMEOUT_S)
    used = np.frombuffer(parts_of(host)[0], np.uint8)
    assert reading.host.register(reading.path).digest == reading.digest
    reading.end()
    assert host.error is None
    num_bytes = reading.host.arena.taken_bytes
    assert (np.frombuffer(parts_of(host)[0], np.uint8) == used).all()
    reading.let_go(host)
    assert reading.host.arena.taken_bytes == num_bytes // 2


class FirstReading(Reading):
    """Of an adapter with values that nothing has read."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.of_content = self.digest
        self.evict()
        self.told: list[tuple[str, object]] = []
        self.store.on_first_read = lambda digest, end: self.told.append((digest, end))
        self.digest = self.host.begin(path).digest


@pytest.fixture
def first(files: Path, tmp_path: Path) -> Iterator[FirstReading]:
    reading = FirstReading(Path(shutil.copytree(files, tmp_path / "first")))
    yield reading
    if reading.thread is not None:
        reading.end()
    assert reading.host.arena.num_references == 0
    reading.device.close(timeout_s=TIMEOUT_S)


def test_the_digest_is_known_before_the_load_ends(first: FirstReading) -> None:
    host = first.begin()
    first.gate.let(11)
    assert host.wait_whole(1, TIMEOUT_S)
    assert first.told == []
    seen: list[tuple[int, bool]] = []

    def note(digest: str, end: object) -> None:
        seen.append((host.num_whole, host.is_read))
        first.told.append((digest, end))

    first.store.on_first_read = note
    first.end()
    assert first.told == [(first.digest, first.of_content)]
    assert seen == [(len(host.places), False)], "layers do not wait for it"
    first.let_go(host)
    again = first.begin()  # and is verified from now on
    first.end()
    assert again.error is None and len(first.told) == 1
    first.let_go(again)
    edit_tensors(first.path, layers__1__mlp__up_proj__lora_B=lambda tensor: tensor + 1)
    changed = first.begin()
    first.end()
    assert "have changed since the adapter was registered" in str(changed.error)
    first.let_go(changed, has_failed=True)


def nan(tensor: torch.Tensor) -> torch.Tensor:
    return torch.full_like(tensor, torch.nan)


@pytest.mark.parametrize("is_cut", [False, True])
def test_what_is_damaged_half_way_is_told_and_leaves_nothing(first: FirstReading, is_cut: bool) -> None:
    if not is_cut:
        edit_tensors(first.path, layers__1__mlp__up_proj__lora_B=nan)
        first.digest = first.host.begin(first.path).digest
    host = first.begin()
    first.gate.let(6)
    assert host.wait_whole(1, TIMEOUT_S)
    if is_cut:
        weights = first.path / "adapter_model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-4])
    first.end()
    assert not host.wait_whole(len(host.places), TIMEOUT_S)
    assert ("changed while it was read" if is_cut else "not finite") in str(host.error)
    assert first.told == [(first.digest, host.error)]
    first.let_go(host, has_failed=True)
    assert first.host.arena.taken_bytes == 0
    first.host.remove_content(first.digest)


def test_files_of_another_header_are_not_read(first: FirstReading) -> None:
    edit_tensors(first.path, layers__1__mlp__up_proj__lora_B=lambda tensor: tensor + 1)
    with pytest.raises(AdapterChangedError, match="changed before they were first read"):
        first.host.fetch(first.digest, first.path)
    assert [(digest, type(end)) for digest, end in first.told] == [(first.digest, AdapterChangedError)]
    assert first.host.arena.taken_bytes == 0


def test_a_cancelled_first_load_says_nothing_of_the_files(first: FirstReading) -> None:
    host = first.begin()
    first.gate.let(6)
    assert host.wait_whole(1, TIMEOUT_S)
    first.is_wanted = False
    first.end()
    first.let_go(host, has_failed=True)
    first.is_wanted = True
    assert first.told == []
    again = first.begin()
    first.end()
    assert first.told == [(first.digest, first.of_content)]
    first.let_go(again)


def test_content_may_be_removed_while_its_first_load_ends(first: FirstReading) -> None:
    remover = threading.Thread(target=first.store.remove_content, args=(first.digest,))
    num_uses = 0

    class Digest(str):
        __slots__ = ()
        __eq__ = str.__eq__

        def __hash__(self) -> int:
            nonlocal num_uses
            if threading.current_thread() is first.thread:
                num_uses += 1
                if num_uses == 2:  # the load has seen that the content is there
                    remover.start()
                    remover.join(0.1)
            return super().__hash__()

    first.digest = Digest(first.digest)
    host = first.begin()
    first.end()
    remover.join(TIMEOUT_S)
    assert host.error is None
    first.let_go(host)


def test_files_that_do_not_answer_are_not_bad(first: FirstReading, monkeypatch: pytest.MonkeyPatch) -> None:
    host = first.begin()
    first.gate.let(6)
    assert host.wait_whole(1, TIMEOUT_S)

    def silent(*_: object) -> None:
        raise SilentError(str(first.path), 10.0)

    with monkeypatch.context() as patched:
        patched.setattr(FILES, "call", silent)
        first.end()
    assert "does not answer" in str(host.error)
    first.let_go(host, has_failed=True)
    assert first.told == []
    again = first.begin()
    first.end()
    assert first.told == [(first.digest, first.of_content)]
    first.let_go(again)


def test_a_pass_with_the_last_layer_waits_for_the_digest(
    first: FirstReading, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_let, digests = threading.Event(), LateDigests.digests

    def late(self: LateDigests) -> list[bytes]:
        assert is_let.wait(TIMEOUT_S)
        return digests(self)

    monkeypatch.setattr(LateDigests, "digests", late)
    monkeypatch.setattr(arrival_module, "_READ_TIMEOUT_S", TIMEOUT_S)
    first.evict()
    load = first.host.fetch(first.digest, first.path)
    assert isinstance(load, Copied)
    load.start(is_gradual=False)
    first.thread = threading.Thread(target=load.read, args=(lambda: None, lambda: True))
    first.thread.start()
    wait_until(lambda: load.begin_pass() == 2)
    assert first.told == [] and not load.is_done()
    timer = threading.Timer(0.02, is_let.set)
    timer.start()
    assert not load.has_failed()
    assert first.told == [(first.digest, first.of_content)]
    first.device.synchronize(timeout_s=TIMEOUT_S)
    load.finish()
    first.host.loaded(first.digest)


def test_memory_that_runs_out_between_two_layers_fails_the_load(
    first: FirstReading, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not first.host.arena.writes_allocate:
        pytest.skip("pages of shared memory are huge here, and allocated with the place")
    write, writes = HostArena.write, list[int]()

    def refuse(arena: HostArena, entry: ArenaEntry, offset: int, data: memoryview) -> None:
        second = next(region.offset for region in entry.regions if region.layer == 1)
        writes.extend([offset] if offset == second else [])
        if len(writes) == 2:  # after its header
            raise SpaceError("adapters", 1, 0, "free memory or request less")
        write(arena, entry, offset, data)

    monkeypatch.setattr(HostArena, "write", refuse)
    host = first.begin()
    first.end()
    assert len(writes) == 2 and host.num_whole == sum(place.layer == 0 for place in host.places)
    assert isinstance(host.error, ResourceError) and "free memory" in str(host.error)
    first.let_go(host, has_failed=True)
    assert first.told == [] and first.host.arena.taken_bytes == 0
    monkeypatch.setattr(HostArena, "write", write)
    again = first.begin()
    first.end()
    assert first.told == [(first.digest, first.of_content)]
    first.let_go(again)


@pytest.mark.parametrize("has_changed", [False, True])
def test_where_kernels_read_the_arena_it_is_there_when_all_is_read(
    files: Path, tmp_path: Path, has_changed: bool
) -> None:
    path = Path(shutil.copytree(files, tmp_path / "a"))
    gate, device = FileGate(), CpuDevice()
    host = Host(device, shared(1 << 20), gate=gate)
    digest = host.register(path).digest
    host.evict_idle()
    if has_changed:
        edit_tensors(path, layers__1__mlp__up_proj__lora_B=lambda tensor: tensor + 1)
    loader = AdapterLoader(lambda _: host.fetch(digest, path), lambda: None)
    gate.close()
    gate.let(7)
    loader.start(AdapterTransfer(TransferId(1), AdapterId(1), 1))
    deadline_s = time.monotonic() + TIMEOUT_S
    while gate.num_taken < 7:
        assert loader.take_events() == []
        assert time.monotonic() < deadline_s
    gate.open()
    end = loaded(loader)
    loader.close()
    if has_changed:
        assert end.error is not None and "have changed" in end.error
    else:
        assert end.adapter is not None and end.adapter.release is not None
        assert len(end.adapter.targets) == 6
        end.adapter.release()
    host.end_load(digest, has_failed=has_changed)
    host.evict_idle()
    assert host.arena.taken_bytes == 0
    device.close(timeout_s=TIMEOUT_S)

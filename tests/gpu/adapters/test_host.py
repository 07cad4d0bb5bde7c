"""Adapters between files, arena and device: read once, kept while there is room, never mixed up."""

import shutil
import time
from collections.abc import Iterator
from dataclasses import replace
from mmap import PAGESIZE
from pathlib import Path
from typing import Any

import pytest
import torch
from corun.gpu.adapters.arrival import AdapterLoad
from corun.gpu.adapters.copier import AdapterCopier, DevicePages
from corun.gpu.adapters.host import ArenaSize, RegisteredAdapter
from corun.gpu.device.base import Stream
from corun.gpu.device.cpu import CpuDevice
from corun.gpu.device.link import PacedLink
from corun.gpu.lora.table import DeviceAdapter, TableEntries
from corun.profiles.link import Direction
from corun.runtime.adapters.target_map import Target
from corun.runtime.errors import AdapterError, AdapterUnavailableError, CorunError, ResourceError
from corun.runtime.memory.host_budget import HostSections
from corun.shm.arena import ArenaPages
from corun.shm.errors import SpaceError
from safetensors.torch import load_file
from support.host_adapters import Host, copied, shared
from support.invariants import check_invariants
from support.loading_engine import HeldLink
from support.lora import make_batch
from support.peft_adapters import WEIGHTS, edit_tensors, load_with_peft, save_adapter

ROOMY_BYTES = 1 << 20


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three adapters of one size, and their deltas."""
    directory = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate("abc"):
        save_adapter(directory / name, seed=seed, target_modules=["q_proj", "v_proj", "up_proj"])
    return directory


@pytest.fixture
def device() -> Iterator[CpuDevice]:
    device = CpuDevice()
    yield device
    device.close(timeout_s=5)


def start(arrival: AdapterLoad) -> None:
    """Copy all of it at once, as the loader does when it is in turn."""
    arrival.start(is_gradual=False)
    arrival.enqueue_all()


def take(host: Host, arrival: AdapterLoad, digest: str) -> DeviceAdapter:
    """Do the loader's work, but wait."""
    arrival.read(lambda: None, lambda: True)
    start(arrival)
    host.device.synchronize(timeout_s=30)
    assert arrival.is_done()
    try:
        adapter = arrival.finish()
    except CorunError:
        host.end_load(digest, has_failed=True)
        raise
    host.loaded(digest)
    return adapter


def release(host: Host, facts: RegisteredAdapter, adapter: DeviceAdapter) -> None:
    """Release an adapter that was read in place."""
    assert adapter.release is not None
    adapter.release()
    host.end_load(facts.digest)


def load(host: Host, facts: RegisteredAdapter, path: Path) -> DeviceAdapter:
    return take(host, host.fetch(facts.digest, path), facts.digest)


def check_deltas(host: Host, adapter: DeviceAdapter, directory: Path) -> None:
    """The kernels compute the same with it as PEFT."""
    model = load_with_peft(directory)
    row = host.table.add(DeviceAdapter(adapter.targets))
    for target in host.target_map.targets:
        if target.index not in adapter.targets:
            continue
        module = model.get_submodule(f"base_model.model.{target.path}")
        x = torch.eye(target.in_features)
        y = torch.zeros(target.in_features, target.out_features)
        batch = make_batch([(0, target.in_features, 0)], host.table, [row])
        host.backend.add_delta(x, y, target.index, batch)
        torch.testing.assert_close(y.t(), module.get_delta_weight("default"))
    host.table.remove(row)


@pytest.mark.parametrize("size", [shared(ROOMY_BYTES), copied(ROOMY_BYTES)], ids=["shared", "copied"])
@pytest.mark.parametrize("backend", ["numba", "torch"])
def test_from_the_files_to_the_kernels(files: Path, device: CpuDevice, backend: str, size: object) -> None:
    host = Host(device, size, backend=backend)  # type: ignore[arg-type]
    facts = {name: host.register(files / name) for name in "abc"}
    assert len({fact.digest for fact in facts.values()}) == 3
    loaded = {name: load(host, facts[name], files / name) for name in "abc"}
    for name, adapter in loaded.items():
        check_deltas(host, adapter, files / name)
    assert host.num_opened == 3, "read once, at registration"
    memory = {
        lora.a.untyped_storage().data_ptr(): lora.a.untyped_storage().nbytes()
        for lora in loaded["a"].targets.values()
    }
    if not host.cache.is_device_memory:
        assert sum(memory.values()) == facts["a"].num_bytes
        assert device.link.stats(Direction.TO_DEVICE).num_bytes > 0
        assert num_references(host) == 0
    else:
        assert device.link.stats(Direction.TO_DEVICE).num_bytes == 0
        assert num_references(host) == 3
        assert host.arena.taken_bytes == 3 * facts["a"].num_bytes
    for name, adapter in loaded.items():
        if host.cache.is_device_memory:
            release(host, facts[name], adapter)
    assert num_references(host) == 0
    memory.clear()
    loaded.clear()
    del adapter
    host.adapters.close()


def num_references(host: Host) -> int:
    check_invariants(host.arena)
    return host.arena.num_references


def test_an_evicted_adapter_is_read_again(files: Path, device: CpuDevice) -> None:
    num_bytes = Host(device, shared(ROOMY_BYTES)).register(files / "a").num_bytes
    host = Host(device, shared(4 * num_bytes), idle_bytes=2 * num_bytes)
    facts = {name: host.register(files / name) for name in "abc"}
    assert host.arena.taken_bytes == 2 * num_bytes
    assert host.num_opened == 3
    adapter = load(host, facts["a"], files / "a")
    assert host.num_opened == 4
    check_deltas(host, adapter, files / "a")
    again = load(host, facts["c"], files / "c")
    assert host.num_opened == 4, "the one that was registered last had stayed"
    release(host, facts["c"], again)
    release(host, facts["a"], adapter)


def test_kv_blocks_take_the_place_of_adapters_that_nobody_uses(files: Path, device: CpuDevice) -> None:
    num_bytes = Host(device, shared(ROOMY_BYTES)).register(files / "a").num_bytes
    host = Host(device, shared(4 * num_bytes), idle_bytes=4 * num_bytes)
    facts = {name: host.register(files / name) for name in "abc"}
    used = load(host, facts["a"], files / "a")

    def note(kv_bytes: int) -> None:
        host.cache.keep_within(4 * num_bytes - kv_bytes)
        host.carry_out()

    note(num_bytes)
    assert host.arena.taken_bytes == 3 * num_bytes
    note(num_bytes + 1)
    assert host.arena.taken_bytes == 2 * num_bytes
    note(4 * num_bytes)
    assert host.arena.taken_bytes == num_bytes
    check_deltas(host, used, files / "a")
    opened = host.num_opened
    assert replace(host.register(files / "b"), is_kept=True) == facts["b"]
    assert host.arena.taken_bytes == num_bytes, "checked and not kept: there is no room"
    late = load(host, facts["b"], files / "b")  # the budget has said that it may
    assert host.num_opened == opened + 2
    release(host, facts["a"], used)
    release(host, facts["b"], late)
    assert host.arena.taken_bytes == 0


def test_files_that_changed_after_an_eviction(files: Path, device: CpuDevice, tmp_path: Path) -> None:
    path = Path(shutil.copytree(files / "a", tmp_path / "a"))
    host = Host(device, shared(ROOMY_BYTES), idle_bytes=0)
    facts = host.register(path)
    assert host.arena.taken_bytes == 0
    edit_tensors(path, lora_A=lambda tensor: tensor + 1)
    with pytest.raises(AdapterError, match="have changed since the adapter was registered"):
        load(host, facts, path)
    (path / WEIGHTS).write_bytes((path / WEIGHTS).read_bytes()[:-9])
    with pytest.raises(AdapterError, match="truncated or damaged"):
        host.fetch(facts.digest, path)
    shutil.rmtree(path)
    with pytest.raises(AdapterError, match="no such adapter directory"):
        host.fetch(facts.digest, path)
    assert host.arena.taken_bytes == 0
    check_invariants(host.arena)


def test_files_that_changed_are_not_read_while_the_arena_has_them(
    files: Path, device: CpuDevice, tmp_path: Path
) -> None:
    path = Path(shutil.copytree(files / "a", tmp_path / "a"))
    host = Host(device, shared(ROOMY_BYTES))
    facts = host.register(path)
    edit_tensors(path, lora_A=lambda tensor: tensor * 2)
    new = host.register(path)
    assert new.digest != facts.digest
    old_adapter, new_adapter = load(host, facts, path), load(host, new, path)
    check_deltas(host, old_adapter, files / "a")
    check_deltas(host, new_adapter, path)
    host.remove_content(facts.digest)
    check_deltas(host, old_adapter, files / "a")
    before = host.arena.taken_bytes
    release(host, facts, old_adapter)
    assert host.arena.taken_bytes == before - facts.num_bytes
    release(host, new, new_adapter)


def test_a_bad_file_leaves_nothing_in_the_arena(files: Path, device: CpuDevice, tmp_path: Path) -> None:
    path = Path(shutil.copytree(files / "a", tmp_path / "a"))
    edit_tensors(path, layers__1__mlp__up_proj__lora_B=lambda tensor: tensor / 0)
    host = Host(device, shared(ROOMY_BYTES))
    with pytest.raises(AdapterError, match="not finite"):
        host.register(path)
    assert host.arena.taken_bytes == 0
    check_invariants(host.arena)


def test_an_adapter_larger_than_the_arena_is_refused_when_it_is_registered(
    files: Path, device: CpuDevice
) -> None:
    host = Host(device, copied(8192))
    with pytest.raises(AdapterError, match=r"8192 bytes.*--host-bytes"):
        host.register(files / "a")


def test_an_arena_full_of_what_is_in_use(files: Path, device: CpuDevice) -> None:
    roomy = Host(device, copied(ROOMY_BYTES))
    roomy.register(files / "a")
    host = Host(device, copied(roomy.arena.taken_bytes))
    facts = {name: host.register(files / name) for name in "ab"}
    first = host.fetch(facts["a"].digest, files / "a")
    assert host.cache.begin_load(facts["b"].digest, facts["b"].host_bytes) is None
    assert not host.register(files / "c").is_kept, "checked and not kept"
    adapter = take(host, first, facts["a"].digest)
    check_deltas(host, adapter, files / "a")
    second = load(host, facts["b"], files / "b")
    check_deltas(host, second, files / "b")


def test_an_unload_while_it_is_loading(files: Path, device: CpuDevice) -> None:
    """The host's copy is removed when the copy to the device has ended."""
    host = Host(device, copied(ROOMY_BYTES))
    facts = host.register(files / "a")
    arrival = host.fetch(facts.digest, files / "a")
    host.remove_content(facts.digest)
    adapter = take(host, arrival, facts.digest)
    assert host.arena.taken_bytes == 0
    check_deltas(host, adapter, files / "a")
    other = host.register(files / "b")
    cancelled = host.fetch(other.digest, files / "b")
    start(cancelled)
    host.remove_content(other.digest)
    cancelled.cancel()
    host.end_load(other.digest, has_failed=True)
    assert host.arena.taken_bytes == 0


def test_a_copy_that_fails_fails_its_adapter(
    files: Path, device: CpuDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = Host(device, copied(ROOMY_BYTES))
    facts = host.register(files / "a")

    def fail(*_: object, **__: object) -> torch.Tensor:
        raise RuntimeError("no room for rows")

    with monkeypatch.context() as patch:
        patch.setattr("corun.gpu.adapters.copier.unpack", fail)
        arrival = host.fetch(facts.digest, files / "a")
        start(arrival)
        deadline_s = time.monotonic() + 30
        while not arrival.is_done():
            assert time.monotonic() < deadline_s
        with pytest.raises(AdapterUnavailableError, match=r"copying it to the device failed.*no room"):
            arrival.finish()
    assert num_references(host) == 0
    check_deltas(host, load(host, facts, files / "a"), files / "a")


def test_a_copy_that_cannot_be_enqueued_fails_its_adapter(
    files: Path, device: CpuDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Earlier copies are running, so it ends when they do."""
    host = Host(device, copied(ROOMY_BYTES), backend="numba")
    facts = host.register(files / "a")
    copy = AdapterCopier.copy
    num_copies = 0

    def refuse(self: AdapterCopier, *args: Any) -> None:
        nonlocal num_copies
        num_copies += 1
        if num_copies == 2:
            raise RuntimeError("no more copies")
        copy(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(AdapterCopier, "copy", refuse)
        arrival = host.fetch(facts.digest, files / "a")
        start(arrival)
    device.synchronize(timeout_s=30)
    assert arrival.is_done()
    with pytest.raises(AdapterUnavailableError, match=r"failed: no more copies"):
        arrival.finish()
    assert num_references(host) == 0
    check_deltas(host, load(host, facts, files / "a"), files / "a")


def test_a_load_that_is_given_up_waits_for_its_copies_or_keeps_what_they_read(
    files: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    link = HeldLink()
    device = CpuDevice(link=link)
    host = Host(device, copied(ROOMY_BYTES), backend="numba")
    facts = host.register(files / "a")
    monkeypatch.setattr("corun.gpu.adapters.arrival._CANCEL_TIMEOUT_S", 0.01)
    link.is_open = False
    arrival = host.fetch(facts.digest, files / "a")
    start(arrival)
    arrival.cancel()
    assert num_references(host) == 1
    assert "its host memory stays in use" in caplog.text
    monkeypatch.undo()
    link.num_to_fail, link.is_open = 1, True
    second = host.fetch(facts.digest, files / "a")
    start(second)
    second.cancel()  # its copy has failed, which is only logged
    assert num_references(host) == 1
    del arrival, second
    device.close()


def test_an_arena_without_memory_for_its_sections_says_so(
    device: CpuDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    def take(_self: ArenaPages, _offset: int, num_bytes: int) -> None:
        raise SpaceError("a section", num_bytes, 0, "lower it")

    monkeypatch.setattr(ArenaPages, "take_section", take)
    sections = HostSections(ROOMY_BYTES // PAGESIZE, PAGESIZE, 1, 1)
    with pytest.raises(SpaceError, match="a section"):
        Host(device, replace(copied(ROOMY_BYTES), sections=sections))


def test_no_copy_lies_in_two_sections_of_the_arena(files: Path) -> None:
    """CUDA registers sections one by one."""
    places: list[tuple[int, int]] = []

    class Noting(CpuDevice):
        def copy(self, stream: Stream, destination: torch.Tensor, source: torch.Tensor) -> None:
            places.append((int(source.storage_offset()), source.numel()))
            super().copy(stream, destination, source)

    device = Noting()
    sections = HostSections(ROOMY_BYTES // PAGESIZE, PAGESIZE, 1, ROOMY_BYTES // PAGESIZE)
    host = Host(device, replace(copied(ROOMY_BYTES), sections=sections))
    facts = host.register(files / "a")
    check_deltas(host, load(host, facts, files / "a"), files / "a")
    assert max(facts.host_bytes) > PAGESIZE, "a layer lies in two sections"
    assert all(start // PAGESIZE == (start + size - 1) // PAGESIZE for start, size in places)
    device.close()


def paged(num_pages: int, page_bytes: int) -> ArenaSize:
    """An arena that adapters are copied from to pages."""
    memory = torch.full((num_pages * page_bytes,), 255, dtype=torch.uint8)
    return replace(copied(ROOMY_BYTES), pages=DevicePages(memory, page_bytes, max_rank=64))


@pytest.mark.parametrize("page_bytes", [640, 4096, 1 << 18])
def test_on_pages_loads_ask_torch_for_no_memory(
    files: Path, device: CpuDevice, monkeypatch: pytest.MonkeyPatch, page_bytes: int
) -> None:
    """Allocating is forbidden while streams wait for the host, which may be at any time."""
    size = paged((1 << 20) // page_bytes, page_bytes)
    host = Host(device, size)
    facts = {name: host.register(files / name) for name in "abc"}
    num_bytes = Host(device, copied(ROOMY_BYTES)).register(files / "a").num_bytes
    run_pages = facts["a"].run_pages
    assert num_bytes <= facts["a"].num_bytes == sum(run_pages) * page_bytes
    assert facts["a"].num_bytes <= 1.01 * num_bytes + page_bytes
    # On the device everything is a view of the pages; the host's side reads no files here.
    monkeypatch.setattr("corun.gpu.adapters.copier.torch", None)
    loaded, free = {}, list(range((1 << 20) // page_bytes))
    for index, name in enumerate("abc"):
        arrival = host.fetch(facts[name].digest, files / name)
        runs = []
        for length in run_pages:
            runs.append(range(free[-length], free[-length] + length))  # from the end, so in no order
            del free[-length:]
        arrival.start(is_gradual=index == 1, runs=runs)
        host.device.synchronize(timeout_s=30)
        while not arrival.is_done():
            arrival.advance()
            host.device.synchronize(timeout_s=30)
        loaded[name] = arrival.finish()
    monkeypatch.undo()
    assert size.pages is not None
    for name, adapter in loaded.items():
        check_deltas(host, adapter, files / name)
        storages = {lora.a.untyped_storage().data_ptr() for lora in adapter.targets.values()}
        assert storages == {size.pages.memory.data_ptr()}
        entries, viewed = adapter.entries, TableEntries.of(adapter.targets)
        assert entries.a_pointers.tolist() == viewed.a_pointers.tolist()
        assert entries.b_pointers.tolist() == viewed.b_pointers.tolist()
    left = size.pages.memory.view(-1, page_bytes)[: len(free)]
    assert (left == 255).all(), "a load has written to other pages"


def test_what_no_page_holds_is_refused(files: Path, device: CpuDevice) -> None:
    host = Host(device, paged(1, 4096))
    with pytest.raises(AdapterError, match=r"adapters and KV together have 4096; raise --memory-gib"):
        host.register(files / "a")
    assert host.arena.taken_bytes == 0


def test_copies_take_the_link(files: Path) -> None:
    device = CpuDevice(link=PacedLink(1.0))
    host = Host(device, copied(ROOMY_BYTES), backend="numba")
    facts = host.register(files / "a")
    adapter = load(host, facts, files / "a")
    assert device.link.stats(Direction.TO_DEVICE).num_bytes == facts.num_bytes
    check_deltas(host, adapter, files / "a")
    del adapter
    host.adapters.close()
    device.close()


def test_memory_of_a_released_adapter_serves_the_next_of_its_size(files: Path, device: CpuDevice) -> None:
    host = Host(device, copied(ROOMY_BYTES), backend="numba")
    facts = {name: host.register(files / name) for name in "abc"}

    def bring(name: str) -> DeviceAdapter:
        adapter = load(host, facts[name], files / name)
        check_deltas(host, adapter, files / name)
        return adapter

    first, second = bring("a"), bring("b")
    assert _address(first) != _address(second), "the first is still read"
    assert first.release is not None
    first.release()
    third = bring("c")
    assert _address(third) == _address(first)
    check_deltas(host, second, files / "b")
    host.adapters.close()


def _address(adapter: DeviceAdapter) -> int:
    return int(adapter.entries.a_pointers.min())


def test_too_little_memory_for_an_elastic_arena(
    files: Path, device: CpuDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = Host(device, shared(ROOMY_BYTES))
    facts = host.register(files / "a")
    host.remove_content(facts.digest)

    monkeypatch.setattr("corun.shm.backing.available_memory_bytes", lambda: 0)
    again = host.register(files / "a")
    assert not again.is_kept and again.digest == facts.digest
    with pytest.raises(ResourceError, match="or request less"):
        host.fetch(facts.digest, files / "a")
    assert host.arena.taken_bytes == 0


def test_adapters_of_one_recipe_are_placed_once(
    files: Path, device: CpuDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, num_placed = AdapterCopier.place, 0

    def count(*arguments: Any) -> Any:
        nonlocal num_placed
        num_placed += 1
        return place(*arguments)

    monkeypatch.setattr(AdapterCopier, "place", count)
    host = Host(device, copied(ROOMY_BYTES))
    first, second, third = (host.begin(files / name) for name in "aba")
    assert num_placed == 1
    assert replace(second, digest=first.digest) == replace(third, digest=first.digest) == first
    for facts, name in ((second, "b"), (first, "a")):
        check_deltas(host, load(host, facts, files / name), files / name)
    host.adapters.close()


@pytest.mark.parametrize("size", [shared(ROOMY_BYTES), copied(ROOMY_BYTES)], ids=["shared", "copied"])
@pytest.mark.parametrize("backend", ["numba", "torch"])
def test_factors_of_dora_are_made_whenever_its_files_are_read(
    tmp_path: Path, device: CpuDevice, backend: str, size: ArenaSize
) -> None:
    save_adapter(tmp_path, target_modules="all-linear", use_dora=True)
    model = load_with_peft(tmp_path)
    host = Host(device, size, backend=backend)

    def layer(target: Target) -> Any:
        return model.get_submodule(f"base_model.model.{target.path}")

    host.adapters.set_base(lambda one: (layer(one).base_layer.weight.detach(), None))
    facts = host.register(tmp_path)
    for num_opened in (1, 2):
        adapter = load(host, facts, tmp_path)
        row = host.table.add(DeviceAdapter(adapter.targets))
        for target in host.target_map.inside:
            x = torch.randn(5, target.in_features)
            y, expected = layer(target).base_layer(x).detach(), layer(target)(x).detach()
            batch = make_batch([(0, 5, 0)], host.table, [row])
            host.backend.add_delta(x, y, target.index, batch)
            torch.testing.assert_close(y, expected)
        host.table.remove(row)
        if host.cache.is_device_memory:
            release(host, facts, adapter)
        del adapter
        host.evict_idle()
        assert host.num_opened == num_opened
    host.adapters.close()


@pytest.mark.parametrize("size", [shared(ROOMY_BYTES), copied(ROOMY_BYTES)], ids=["shared", "copied"])
@pytest.mark.parametrize("backend", ["numba", "torch"])
def test_rows_of_tokens_arrive_with_the_matrices(
    tmp_path: Path, device: CpuDevice, backend: str, size: ArenaSize
) -> None:
    """Of a target without matrices, and of one that has both."""
    save_adapter(tmp_path, target_modules=["q_proj", "lm_head"], modules_to_save=["embed_tokens"])
    host = Host(device, size, backend=backend)
    facts = host.register(tmp_path)
    assert facts.not_by_workers == "embeddings and the output head"
    saved = load_file(tmp_path / WEIGHTS)
    ranks = {"model.embed_tokens": 0, "lm_head": 4}
    outside = [target for target in host.target_map.targets if not target.is_inside]
    for num_opened in (1, 2):
        adapter = load(host, facts, tmp_path)
        for target in outside:
            found = adapter.targets[target.index]
            (weight,) = (
                tensor
                for name, tensor in saved.items()
                if f"{target.path}." in name and tensor.shape == (96, 64)
            )
            assert found.own is not None and found.rank == ranks[target.path]
            assert found.own.token_ids.tolist() == list(range(found.own.num_tokens))
            assert torch.equal(found.own.rows, weight)
        if host.cache.is_device_memory:
            release(host, facts, adapter)
        del adapter, found
        host.evict_idle()
        assert host.num_opened == num_opened
    host.adapters.close()


def test_the_kernel_of_factors_is_compiled_for_the_first_adapter_that_needs_it(
    files: Path, tmp_path: Path, device: CpuDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the thread that reads it: neither a start nor a step waits."""
    save_adapter(tmp_path, use_dora=True)
    host = Host(device, shared(ROOMY_BYTES), backend="numba")
    prepared: list[str] = []
    monkeypatch.setattr(host.backend, "prepare_factors", lambda: prepared.append("dora"))
    host.adapters.set_base(lambda one: (torch.ones(one.out_features, one.in_features), None))
    assert host.register(files / "a").not_by_workers == ""
    assert prepared == []
    assert host.register(tmp_path).not_by_workers == "DoRA"
    assert prepared == ["dora"]
    host.adapters.close()

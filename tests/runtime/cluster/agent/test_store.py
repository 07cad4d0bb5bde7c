"""The store of adapter files: copies are complete or absent, and which is dropped for room."""

import asyncio
import os
import resource
import signal
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from corun.runtime.adapters.folder_files import OWN_FILES, AdapterRoots
from corun.runtime.cluster.agent.files import (
    ADAPTER_FILES,
    StoreFullError,
    describe,
    digest_of,
    is_wellformed,
)
from corun.runtime.cluster.agent.store import AdapterFileStore, check_digest
from corun.runtime.cluster.wire import Manifest, StoredFile
from corun.runtime.errors import AdapterError, ConfigError
from corun.runtime.file_calls import FILES
from corun.runtime.server.errors import HttpError
from support.adapter_files import CONFIG, WEIGHTS, write_adapter
from support.fake_clock import FakeClock
from support.processes import line_of, program

ROOM = 1 << 30


async def always(digest: str) -> bool:
    return True


async def never(digest: str) -> bool:
    return False


def with_store(
    directory: Path,
    work: Callable[[AdapterFileStore], Awaitable[None]],
    capacity_bytes: int = ROOM,
    clock: Callable[[], float] = time.monotonic,
    roots: AdapterRoots = OWN_FILES,
) -> None:
    async def run() -> None:
        store = AdapterFileStore(directory, capacity_bytes, roots=roots, clock=clock)
        try:
            await work(store)
        finally:
            store.close()

    asyncio.run(run())


async def ingest(store: AdapterFileStore, source: Path) -> str:
    manifest, _ = await store.ingest(source, always)
    return manifest.digest


def test_files_are_copied_and_named_by_what_they_hold(tmp_path: Path) -> None:
    source = write_adapter(tmp_path / "a", rank=16)
    (source / "chat_template.jinja").write_text("x")
    (source / "README.md").write_text("not read")
    same = write_adapter(tmp_path / "b", rank=16)
    (same / "chat_template.jinja").write_text("x")
    other = write_adapter(tmp_path / "c", rank=16)

    async def work(store: AdapterFileStore) -> None:
        manifest, rank = await store.ingest(source, always)
        assert rank == 16
        assert {one.name for one in manifest.files} == {CONFIG, WEIGHTS, "chat_template.jinja"}
        assert await ingest(store, same) == manifest.digest
        assert await ingest(store, other) != manifest.digest  # the template is content, too
        path = store.path(manifest.digest)
        assert (path / WEIGHTS).read_bytes() == (source / WEIGHTS).read_bytes()
        (source / WEIGHTS).write_bytes(b"other")  # a copy, not a link
        assert (path / WEIGHTS).stat().st_ino != (source / WEIGHTS).stat().st_ino
        assert os.listdir(tmp_path / "store/incoming") == []

    with_store(tmp_path / "store", work)


def test_links_within_the_roots_are_followed_and_what_is_no_file_is_refused(tmp_path: Path) -> None:
    source = write_adapter(tmp_path / "a")
    linked = tmp_path / "linked"
    linked.mkdir()
    for name in (CONFIG, WEIGHTS):
        (linked / name).symlink_to(source / name)
    os.mkfifo(source / "tokenizer.json")

    async def work(store: AdapterFileStore) -> None:
        digest = await ingest(store, linked)
        assert not (store.path(digest) / WEIGHTS).is_symlink()
        with pytest.raises(AdapterError, match=r"tokenizer\.json: not a regular file"):
            await store.ingest(source, always)

    with_store(tmp_path / "store", work, roots=AdapterRoots.of(str(tmp_path), ()))

    async def without(store: AdapterFileStore) -> None:
        with pytest.raises(AdapterError, match=r"a link to a file outside of its directory"):
            await store.ingest(linked, always)

    with_store(tmp_path / "other-store", without)


@pytest.mark.parametrize("name", ["chat_template.jinja", "generation_config.json"])
def test_a_template_that_is_a_link_out_is_not_copied(tmp_path: Path, name: str) -> None:
    source = write_adapter(tmp_path / "loras" / "a")
    (tmp_path / "secret").write_text("of another user")
    (source / name).symlink_to(tmp_path / "secret")

    async def work(store: AdapterFileStore) -> None:
        with pytest.raises(AdapterError, match=f"{name}: it is a link .*--lora-dir") as caught:
            await store.ingest(source, always)
        assert str(tmp_path / "secret") not in str(caught.value)
        assert store.ages_s() == {} and store.used_bytes == 0

    roots = AdapterRoots.of(str(tmp_path / "loras"), ())
    with_store(tmp_path / "store", work, roots=roots)
    with pytest.raises(AdapterError, match="it is a link"):
        describe(source, roots)


def test_a_source_that_does_not_answer_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FILES, "timeout_s", 0.5)
    source, answers, real = write_adapter(tmp_path / "a"), threading.Event(), os.readv

    def stuck(descriptor: int, buffers: list[memoryview]) -> int:
        assert answers.wait(20.0)
        return real(descriptor, buffers)

    monkeypatch.setattr(os, "readv", stuck)

    async def work(store: AdapterFileStore) -> None:
        with pytest.raises(AdapterError, match="the file system does not answer"):
            await store.ingest(source, always)
        answers.set()
        while FILES.is_silent(str(source)):
            await asyncio.sleep(0.001)
        monkeypatch.setattr(FILES, "timeout_s", 20.0)
        await ingest(store, source)

    with_store(tmp_path / "store", work)


def test_a_file_that_grows_while_it_is_copied_is_not_copied_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, real, num_reads = write_adapter(tmp_path / "a"), os.readv, 0

    def growing(descriptor: int, buffers: list[memoryview]) -> int:
        nonlocal num_reads
        num_reads += 1
        return real(descriptor, buffers) or buffers[0].nbytes

    monkeypatch.setattr(os, "readv", growing)

    async def work(store: AdapterFileStore) -> None:
        with pytest.raises(AdapterError, match="changed while it was read"):
            await store.ingest(source, always)

    with_store(tmp_path / "store", work)
    assert num_reads == 2


@pytest.mark.parametrize(
    ("break_it", "words"),
    [
        (lambda path: (path / CONFIG).unlink(), "holds no adapter_config.json"),
        (lambda path: (path / CONFIG).write_text("{"), "not valid JSON"),
        (lambda path: (path / WEIGHTS).unlink(), "holds no adapter_model.safetensors"),
        (lambda path: os.truncate(path / WEIGHTS, 2000), "truncated or damaged"),
    ],
)
def test_what_is_no_adapter_is_refused_by_the_users_path(
    tmp_path: Path, break_it: Callable[[Path], None], words: str
) -> None:
    source = write_adapter(tmp_path / "a")
    break_it(source)

    async def work(store: AdapterFileStore) -> None:
        with pytest.raises(AdapterError, match=words) as caught:
            await store.ingest(source, always)
        assert str(source) in str(caught.value)
        assert store.ages_s() == {} and store.used_bytes == 0

    with_store(tmp_path / "store", work)


def test_a_start_finds_what_is_whole_and_removes_the_rest(tmp_path: Path) -> None:
    digests: list[str] = []

    async def fill(store: AdapterFileStore) -> None:
        for seed in range(3):
            digests.append(await ingest(store, write_adapter(tmp_path / str(seed), seed=seed)))

    with_store(tmp_path / "store", fill)
    adapters = tmp_path / "store/adapters"
    os.truncate(adapters / digests[0] / WEIGHTS, 100)
    (adapters / "x").mkdir()
    (tmp_path / "store/incoming/half").mkdir()
    data = bytearray((adapters / digests[1] / WEIGHTS).read_bytes())
    data[-1] ^= 1
    (adapters / digests[1] / WEIGHTS).write_bytes(data)

    async def look(store: AdapterFileStore) -> None:
        assert set(store.ages_s()) == set(digests[1:])
        assert os.listdir(tmp_path / "store/incoming") == []
        async with store.in_use(digests[1]) as path:
            assert path is None  # a changed byte is found before it is loaded
        assert set(store.ages_s()) == {digests[2]}
        async with store.in_use(digests[2]) as path:
            assert path == adapters / digests[2]

    with_store(tmp_path / "store", look)
    assert sorted(os.listdir(adapters)) == [digests[2]]


_INGEST = """
import asyncio, sys
from pathlib import Path
from corun.runtime.cluster.agent import store as module

def stuck(*given):
    manifest = copy(*given)
    print("copied", flush=True)
    asyncio.run(asyncio.sleep(60))
    return manifest

copy, module.copy_adapter = module.copy_adapter, stuck
async def always(digest): return True
async def main():
    store = module.AdapterFileStore(Path(sys.argv[1]), 1 << 30)
    await store.ingest(Path(sys.argv[2]), always)
asyncio.run(main())
"""


def test_a_kill_in_mid_ingest_leaves_nothing_half(tmp_path: Path) -> None:
    source = write_adapter(tmp_path / "a", num_bytes=1 << 20)
    store_dir = tmp_path / "store"
    with program(_INGEST, store_dir, source) as process:
        assert line_of(process) == "copied"
        with pytest.raises(ConfigError, match="held by another agent"):
            AdapterFileStore(store_dir, ROOM)
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert os.listdir(store_dir / "incoming")

    async def work(store: AdapterFileStore) -> None:
        assert store.ages_s() == {}
        assert os.listdir(store_dir / "incoming") == []
        async with store.in_use(await ingest(store, source)) as path:
            assert path is not None

    with_store(store_dir, work)


def test_the_one_unused_longest_goes_but_not_what_must_stay(tmp_path: Path) -> None:
    clock = FakeClock()
    sources = [write_adapter(tmp_path / str(i), num_bytes=8192, seed=i) for i in range(5)]

    async def work(store: AdapterFileStore) -> None:
        digests = []
        for source in sources[:3]:
            clock.sleep(1.0)
            digests.append(await ingest(store, source))
        async with store.in_use(digests[0]):
            clock.sleep(1.0)
        store.released = {digests[0], digests[2]}
        digests.append(await ingest(store, sources[3]))
        # 0 was used last, 1 is not released: 2 is dropped.
        assert set(store.ages_s()) == {digests[0], digests[1], digests[3]}
        store.released = {digests[0], digests[3]}
        async with store.in_use(digests[0]):
            with pytest.raises(StoreFullError, match="--adapter-cache-gib") as caught:
                await store.ingest(sources[4], never)
            assert caught.value.status == 507
            await store.ingest(sources[4], always)
            assert digests[0] in store.ages_s() and digests[3] not in store.ages_s()
        assert store.used_bytes <= store.capacity_bytes

    size = sum((sources[0] / name).stat().st_size for name in (CONFIG, WEIGHTS))
    with_store(tmp_path / "store", work, capacity_bytes=3 * size + 64, clock=clock)


def test_what_no_name_stands_for_goes_after_a_while(tmp_path: Path) -> None:
    clock = FakeClock()

    async def work(store: AdapterFileStore) -> None:
        digest = await ingest(store, write_adapter(tmp_path / "a"))
        store.released = {digest}
        await store.drop_unneeded([digest], always)
        assert digest in store.ages_s()  # a new copy: its name may follow
        clock.sleep(100.0)
        await store.drop_unneeded([digest], never)
        assert digest in store.ages_s()
        await store.drop_unneeded([digest, "0" * 64], always)
        assert store.ages_s() == {} and os.listdir(tmp_path / "store/adapters") == []

    with_store(tmp_path / "store", work, clock=clock)


def test_what_is_placed_elsewhere_goes_as_soon_as_it_is_not_used(tmp_path: Path) -> None:
    clock = FakeClock()
    asked: list[str] = []

    async def used(digest: str) -> bool:
        asked.append(digest)
        return False

    async def work(store: AdapterFileStore) -> None:
        digest = await ingest(store, write_adapter(tmp_path / "a"))
        clock.sleep(4.0)
        await store.drop_strays([digest], always)
        assert digest in store.ages_s()  # perhaps the last copy
        store.released = {digest}
        await store.drop_strays([digest], always)
        assert digest in store.ages_s()  # a request may follow
        clock.sleep(2.0)
        for _ in range(3):  # engines are not queried at each report
            await store.drop_strays([digest], used)
        assert asked == [digest] and digest in store.ages_s()
        clock.sleep(6.0)
        async with store.in_use(digest):
            await store.drop_strays([digest], always)
            assert digest in store.ages_s()
        clock.sleep(6.0)
        await store.drop_strays([digest, "0" * 64], always)
        assert store.ages_s() == {} and os.listdir(tmp_path / "store/adapters") == []

    with_store(tmp_path / "store", work, clock=clock)


def test_a_full_disk_is_said_and_leaves_nothing(tmp_path: Path) -> None:
    source = write_adapter(tmp_path / "a", num_bytes=1 << 20)

    async def work(store: AdapterFileStore) -> None:
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
        try:
            with pytest.raises(StoreFullError, match=f"cannot write .*{WEIGHTS} .--state-dir"):
                await store.ingest(source, always)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert store.ages_s() == {} and store.used_bytes == 0
        assert os.listdir(tmp_path / "store/incoming") == []
        await store.ingest(source, always)

    with_store(tmp_path / "store", work)


@pytest.mark.parametrize(
    "text", ["", "..", "../../etc/passwd", "/etc/passwd", "A" * 64, "a" * 63, "a" * 64 + "\n"]
)
def test_a_path_is_no_digest(text: str) -> None:
    with pytest.raises(HttpError, match="is no digest") as caught:
        check_digest(text)
    assert caught.value.status == 400


def test_a_manifest_cannot_claim_a_digest_or_a_path() -> None:
    files = [StoredFile(name=name, num_bytes=1, sha256="0" * 64) for name in ADAPTER_FILES[:2]]
    assert is_wellformed(Manifest(digest=digest_of(files), files=tuple(files)))
    assert not is_wellformed(Manifest(digest="0" * 64, files=tuple(files)))
    for name in ("../x", "/etc/passwd", "README.md"):
        wrong = [*files, StoredFile(name=name, num_bytes=1, sha256="0" * 64)]
        assert not is_wellformed(Manifest(digest=digest_of(wrong), files=tuple(wrong)))
    assert not is_wellformed(Manifest(digest=digest_of(files[:1]), files=tuple(files[:1])))

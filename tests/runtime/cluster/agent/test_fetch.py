"""Fetches from other agents, also wrong, silent and dead ones, and from the source."""

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from aiohttp import ClientSession, web
from corun.runtime.cluster.agent import fetch
from corun.runtime.cluster.agent.fetch import SOURCE, Fetcher
from corun.runtime.cluster.agent.files import StoreFullError, holds
from corun.runtime.cluster.agent.store import AdapterFileStore
from corun.runtime.cluster.http.serving import struct_response
from corun.runtime.cluster.wire import AGENT_FILES_PATH, Manifest, PeerFetches
from corun.runtime.server.errors import HttpError
from support.adapter_files import WEIGHTS, write_adapter
from support.agents import KEY, agent_of, entry_of, opened_store, release, serving

NUM_BYTES = 3 << 20
Work = Callable[[AdapterFileStore, Fetcher, str, str], Awaitable[None]]


def with_peer(tmp_path: Path, work: Work, *, capacity_bytes: int = 1 << 30) -> None:
    """Call ``work`` with an empty store, its fetcher, a digest and the peer that has it."""
    source = write_adapter(tmp_path / "source", num_bytes=NUM_BYTES)

    async def run() -> None:
        with opened_store(tmp_path / "a") as theirs, opened_store(tmp_path / "b", capacity_bytes) as ours:
            manifest, _ = await theirs.ingest(source, release)
            async with agent_of(theirs) as url:
                fetcher = Fetcher(ours, KEY, release)
                await work(ours, fetcher, manifest.digest, url)
                await fetcher.close()

    asyncio.run(run())


@contextlib.asynccontextmanager
async def bad_peer(
    good: str, break_it: Callable[[web.Request, bytes], Awaitable[web.StreamResponse]]
) -> AsyncIterator[str]:
    """A peer with the right manifest; ``break_it`` answers requests for its weights."""

    async def answer(request: web.Request) -> web.StreamResponse:
        headers = {"Authorization": request.headers["Authorization"]}
        async with ClientSession() as session, session.get(good + request.path, headers=headers) as response:
            data = await response.read()
        if request.path.endswith(WEIGHTS):
            return await break_it(request, data)
        return web.Response(body=data)

    app = web.Application()
    app.router.add_get(AGENT_FILES_PATH + "/{rest:.*}", answer)
    async with serving(app) as url:
        yield url


async def wrong_byte(request: web.Request, data: bytes) -> web.StreamResponse:
    return web.Response(body=data[:-1] + bytes([data[-1] ^ 1]))


async def one_more(request: web.Request, data: bytes) -> web.StreamResponse:
    return web.Response(body=data + b"x")


async def too_few(request: web.Request, data: bytes) -> web.StreamResponse:
    return web.Response(body=data[:-1])


async def half(request: web.Request, data: bytes) -> web.StreamResponse:
    response = web.StreamResponse()
    response.content_length = len(data)
    await response.prepare(request)
    await response.write(data[: len(data) // 2])
    return response


async def hangs(request: web.Request, data: bytes) -> web.StreamResponse:
    response = await half(request, data)
    with contextlib.suppress(ConnectionError):
        while True:
            await asyncio.sleep(0.01)
            if request.transport is None:
                break
    return response


async def dies(request: web.Request, data: bytes) -> web.StreamResponse:
    response = await half(request, data)
    assert request.transport is not None
    request.transport.abort()
    return response


async def refuses(request: web.Request, data: bytes) -> web.StreamResponse:
    raise web.HTTPNotFound


@pytest.mark.parametrize(
    ("break_it", "kind"),
    [
        (wrong_byte, "wrong"),
        (one_more, "wrong"),
        (too_few, "lost"),
        (hangs, "lost"),
        (dies, "lost"),
        (refuses, "lost"),
    ],
)
def test_a_peer_that_fails_gives_way_to_the_next(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    break_it: Callable[[web.Request, bytes], Awaitable[web.StreamResponse]],
    kind: str,
) -> None:
    monkeypatch.setattr(fetch, "SILENT_S", 1.0)

    async def work(store: AdapterFileStore, fetcher: Fetcher, digest: str, good: str) -> None:
        async with bad_peer(good, break_it) as bad:
            await fetcher.ensure(entry_of(digest), [bad, good])
        assert fetcher.by_peer.keys() == {bad, good}
        failed, fetched = fetcher.by_peer[bad], fetcher.by_peer[good]
        assert failed == PeerFetches(num_wrong=kind == "wrong", num_lost=kind == "lost")
        assert (fetched.num_fetched, fetched.num_lost, fetched.num_wrong) == (1, 0, 0)
        assert fetched.num_bytes > NUM_BYTES and fetched.seconds > 0
        async with store.in_use(digest) as path:
            assert path is not None
            source = tmp_path / "source"
            assert (path / WEIGHTS).read_bytes() == (source / WEIGHTS).read_bytes()
        assert list((tmp_path / "b/incoming").iterdir()) == []

    with_peer(tmp_path, work)


def test_a_peer_cannot_pass_other_content_off(tmp_path: Path) -> None:
    async def work(store: AdapterFileStore, fetcher: Fetcher, digest: str, good: str) -> None:
        other = write_adapter(tmp_path / "other", seed=9)
        with opened_store(tmp_path / "c") as third:
            manifest, _ = await third.ingest(other, release)

            async def answer(request: web.Request) -> web.StreamResponse:
                return struct_response(Manifest(digest=digest, files=manifest.files))

            app = web.Application()
            app.router.add_get(f"{AGENT_FILES_PATH}/{digest}", answer)
            async with serving(app) as bad:
                await fetcher.ensure(entry_of(digest), [bad, good])
        assert fetcher.by_peer[bad] == PeerFetches(num_wrong=1)
        assert set(store.ages_s()) == {digest}

    with_peer(tmp_path, work)


def test_dead_peers_leave_the_source_and_then_nothing(tmp_path: Path) -> None:
    async def work(store: AdapterFileStore, fetcher: Fetcher, digest: str, good: str) -> None:
        dead = "http://127.0.0.1:1"
        with pytest.raises(HttpError, match="no source has the files of 'x'") as caught:
            await fetcher.ensure(entry_of(digest), [dead])
        assert caught.value.status == 503
        other = write_adapter(tmp_path / "other", seed=9)
        with pytest.raises(HttpError, match="has changed since it was loaded"):
            await fetcher.ensure(entry_of(digest, other), [dead])
        assert store.ages_s() == {}
        await fetcher.ensure(entry_of(digest, tmp_path / "source"), [dead])
        assert set(store.ages_s()) == {digest}
        assert fetcher.by_peer[dead] == PeerFetches(num_lost=3)
        source = fetcher.by_peer[SOURCE]
        assert (source.num_fetched, source.num_lost) == (1, 2)

    with_peer(tmp_path, work)


def test_one_fetch_however_many_wait(tmp_path: Path) -> None:
    async def work(store: AdapterFileStore, fetcher: Fetcher, digest: str, good: str) -> None:
        waiting = [asyncio.ensure_future(fetcher.ensure(entry_of(digest), [good])) for _ in range(20)]
        await asyncio.sleep(0)
        waiting[0].cancel()  # the fetch goes on without the request that started it
        await asyncio.gather(*waiting[1:])
        assert fetcher.by_peer.keys() == {good} and fetcher.by_peer[good].num_fetched == 1
        await fetcher.ensure(entry_of(digest), [])  # already in the store

    with_peer(tmp_path, work)


def test_a_new_template_brings_no_weights_again(tmp_path: Path) -> None:
    versions = [write_adapter(tmp_path / name, num_bytes=NUM_BYTES) for name in ("one", "two")]
    (versions[1] / "chat_template.jinja").write_text("{{ messages }}")

    async def run() -> None:
        with opened_store(tmp_path / "a") as theirs, opened_store(tmp_path / "b") as ours:
            old, new = [(await theirs.ingest(one, release))[0].digest for one in versions]
            async with agent_of(theirs) as url:
                fetcher = Fetcher(ours, KEY, release)
                await fetcher.ensure(entry_of(old), [url])
                num_before = fetcher.by_peer[url].num_bytes
                await fetcher.ensure(entry_of(new), [url])
                assert 0 < fetcher.by_peer[url].num_bytes - num_before < 1000
                ours.released = frozenset({old})
                shutil.rmtree(ours.path(old))  # as if it were dropped
                manifest = ours.manifest(new)
                assert manifest is not None and holds(ours.path(new), manifest)
                await fetcher.close()

    asyncio.run(run())


def test_a_file_that_has_gone_meanwhile_is_fetched(tmp_path: Path) -> None:
    async def work(store: AdapterFileStore, fetcher: Fetcher, digest: str, good: str) -> None:
        with fetch.PeerFiles(good, KEY, digest) as files:
            manifest = await asyncio.to_thread(files.manifest)
            (tmp_path / "here").mkdir()
            gone = {file.name: tmp_path / "gone" for file in manifest.files}
            num_received = await asyncio.to_thread(files.copy, manifest, tmp_path / "here", gone)
        assert num_received == sum(file.num_bytes for file in manifest.files)
        assert holds(tmp_path / "here", manifest)

    with_peer(tmp_path, work)


def test_without_room_nothing_is_fetched(tmp_path: Path) -> None:
    async def work(store: AdapterFileStore, fetcher: Fetcher, digest: str, good: str) -> None:
        with pytest.raises(StoreFullError, match="--adapter-cache-gib"):
            await fetcher.ensure(entry_of(digest), [good])
        assert store.used_bytes == 0

    with_peer(tmp_path, work, capacity_bytes=NUM_BYTES // 2)


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/{digest}", 200),
        ("/{digest}/adapter_config.json", 200),
        ("/{digest}/manifest.json", 404),
        ("/{digest}/nothing", 404),
        ("/" + "0" * 64, 404),
        ("/..", 400),
        ("/%2e%2e%2f%2e%2e%2fetc%2fpasswd", 400),
        ("//etc/passwd", 400),
        ("/{digest}/../../../etc/passwd", 400),
        ("/{digest}/%2e%2e%2fadapter_config.json", 404),
    ],
)
def test_only_files_of_adapters_are_served(tmp_path: Path, path: str, status: int) -> None:
    async def work(store: AdapterFileStore, fetcher: Fetcher, digest: str, good: str) -> None:
        asked = AGENT_FILES_PATH + path.format(digest=digest)
        reader, writer = await asyncio.open_connection("127.0.0.1", int(good.rpartition(":")[2]))
        for key, expected in ((KEY, status), ("other", 401)):
            head = f"GET {asked} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n\r\n"
            writer.write(head.encode())
            line = await reader.readline()
            assert line.split()[1] == str(expected).encode()
            writer.close()
            reader, writer = await asyncio.open_connection("127.0.0.1", int(good.rpartition(":")[2]))
        writer.close()

    with_peer(tmp_path, work)

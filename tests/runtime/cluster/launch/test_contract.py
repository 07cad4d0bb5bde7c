"""The contract of all launchers."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest
from corun.runtime.cluster.launch.launcher import EXITED, READY, STARTING, EngineLauncher
from corun.runtime.cluster.wire import EngineStatus
from corun.runtime.errors import CorunError
from support.launching import Launched, elsewhere, locally, received_by, seen

Make = Callable[[Path], AbstractAsyncContextManager[Launched]]
each = pytest.mark.parametrize("make", [locally, elsewhere])


def with_launcher(make: Make, path: Path, work: Callable[[Launched], Awaitable[None]]) -> None:
    async def run() -> None:
        async with make(path) as launched:
            try:
                await work(launched)
            finally:
                await launched.launcher.close()
                await launched.launcher.close()  # idempotent

    asyncio.run(run())


async def ready_one(launcher: EngineLauncher, engine_id: str) -> EngineStatus:
    return await seen(launcher, lambda one: one.engine_id == engine_id and one.state == READY)


@each
def test_what_is_started_is_listed_and_answers(make: Make, tmp_path: Path) -> None:
    async def work(launched: Launched) -> None:
        launcher = launched.launcher
        assert launcher.list() == ()
        for engine_id in launched.ids:
            await launcher.start(engine_id)
            await launcher.start(engine_id)  # it runs already
        assert [one.engine_id for one in launcher.list()] == list(launched.ids)
        assert {one.state for one in launcher.list()} <= {STARTING, READY}
        for engine_id in launched.ids:
            ready = await ready_one(launcher, engine_id)
            assert ready.url is not None
            await asyncio.to_thread(received_by, ready.url)
        assert all(one.state == READY and one.num_restarts == 0 for one in launcher.list())

    with_launcher(make, tmp_path, work)


@each
def test_an_end_is_seen_and_so_is_another_beginning(make: Make, tmp_path: Path) -> None:
    async def work(launched: Launched) -> None:
        launcher, engine_id = launched.launcher, launched.ids[0]
        await launcher.start(engine_id)
        await seen(launcher, lambda one: one.state == READY)
        launched.kill(engine_id)
        ended = await seen(launcher, lambda one: one.state == EXITED)
        assert ended.engine_id == engine_id and ended.reason
        assert [one.state for one in launcher.list()] == [EXITED]  # until it is stopped
        await launched.revive(engine_id)
        again = await seen(launcher, lambda one: one.state == READY)
        assert again.reason is None

    with_launcher(make, tmp_path, work)


@each
def test_what_is_stopped_is_listed_no_more(make: Make, tmp_path: Path) -> None:
    async def work(launched: Launched) -> None:
        launcher, (first, second) = launched.launcher, launched.ids
        for engine_id in launched.ids:
            await launcher.start(engine_id)
        watching = asyncio.ensure_future(
            seen(launcher, lambda one: one.engine_id == first and one.state == EXITED)
        )
        await seen(launcher, lambda one: one.engine_id == first and one.state == READY)
        await launcher.stop(first, drain_timeout_s=5.0)
        assert [one.engine_id for one in launcher.list()] == [second]
        assert (await watching).url is None
        await launcher.stop(first, drain_timeout_s=5.0)
        await launcher.stop("unknown", drain_timeout_s=5.0)
        launched.kill(second)
        await seen(launcher, lambda one: one.engine_id == second and one.state == EXITED)
        await launcher.stop(second, drain_timeout_s=5.0)
        assert launcher.list() == ()
        if make is locally:
            await launcher.start(first)  # its share is free again

    with_launcher(make, tmp_path, work)


@each
def test_what_cannot_begin_is_refused_and_not_listed(make: Make, tmp_path: Path) -> None:
    async def work(launched: Launched) -> None:
        if make is elsewhere:
            launched.kill(launched.ids[0])
        else:
            (tmp_path / "a.json").mkdir()  # in place of the file of its options
        with pytest.raises(CorunError):
            await launched.launcher.start(launched.ids[0])
        assert launched.launcher.list() == ()

    with_launcher(make, tmp_path, work)


@each
def test_closing_ends_all_watching(make: Make, tmp_path: Path) -> None:
    async def work(launched: Launched) -> None:
        await launched.launcher.start(launched.ids[0])

        async def watch() -> list[str]:
            return [status.state async for status in launched.launcher.watch()]

        watching = asyncio.ensure_future(watch())
        await seen(launched.launcher, lambda one: one.state == READY)
        await launched.launcher.close()
        assert (await watching)[-1] == EXITED
        assert launched.launcher.list() == ()

    with_launcher(make, tmp_path, work)

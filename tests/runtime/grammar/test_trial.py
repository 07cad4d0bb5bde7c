"""Trials of hostile texts: refused in time, cached, and nothing is left of them."""

import asyncio
import resource
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import psutil
import pytest
from corun.runtime.errors import EngineDeadError, OverloadedError, RequestError
from corun.runtime.grammar.messages import GrammarTokens
from corun.runtime.grammar.trial import GrammarTrials
from corun.runtime.sampling import StructuredOutput
from support.hostile_structures import HOSTILE, SLOW, regex, schema, slow
from support.processes import running_below
from support.serving import wait_until

TIMEOUT_S = 1.0


@asynccontextmanager
async def trials(timeout_s: float = TIMEOUT_S) -> AsyncIterator[GrammarTrials]:
    made = GrammarTrials(lambda: GrammarTokens(1000, {300: "<|call|>"}), timeout_s=timeout_s)
    try:
        yield made
    finally:
        await made.close()
    assert not processes()


_earlier: list[psutil.Process] = []  # of other tests


@pytest.fixture(autouse=True)
def _others_do_not_count() -> None:
    _earlier[:] = running_below("runtime.grammar.process")


def processes() -> list[psutil.Process]:
    """Return the processes of trials that this test has started."""
    return [one for one in running_below("runtime.grammar.process") if one not in _earlier]


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        await test()

    asyncio.run(main())


async def refusal(made: GrammarTrials, structured: StructuredOutput) -> RequestError:
    with pytest.raises(RequestError) as caught:
        await made.check(structured)
    return caught.value


async def settled(made: GrammarTrials, structured: StructuredOutput) -> RequestError | None:
    """The reason of its refusal, if any, once the machine is not too busy to compile it."""
    while True:
        try:
            await made.check(structured)
        except OverloadedError:
            continue
        except RequestError as error:
            return error
        return None


def stop(process: psutil.Process) -> None:
    """Return once it is stopped: until then, a thread of it may still answer."""
    process.send_signal(signal.SIGSTOP)
    wait_until(lambda: process.status() == psutil.STATUS_STOPPED)


def cpu_s_of_children() -> float:
    """Seconds of processor time of all processes of trials, also of those that have ended."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    running = [process.cpu_times() for process in processes()]
    return ended.ru_utime + ended.ru_stime + sum(times.user + times.system for times in running)


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_texts_are_refused_in_time(name: str) -> None:
    async def test() -> None:
        async with trials() as made:
            assert await settled(made, regex("a")) is None  # starts the process
            began_s = cpu_s_of_children()
            error = await settled(made, HOSTILE[name])
            assert cpu_s_of_children() - began_s < 10 * TIMEOUT_S
            assert error is not None
            assert error.param == HOSTILE[name].field and len(str(error)) < 500
            assert await settled(made, regex("b")) is None  # others are not affected

    run(test)


def test_results_are_cached_good_and_bad() -> None:
    async def test() -> None:
        async with trials() as made:
            for _ in range(2):
                await made.check(schema({"type": "string"}))
                error = await refusal(made, schema({"not": {}}))
                assert '"not"' in str(error)
                for process in processes():  # the second time, none is needed
                    process.kill()
                    process.wait(10)
            assert not processes()

    run(test)


def test_only_the_latest_results_are_kept() -> None:
    async def test() -> None:
        async with trials() as made:
            for number in range(1030):
                await made.check(regex(f"a{number}"))
            for process in processes():
                process.kill()
                process.wait(10)
            await made.check(regex("a1029"))
            assert not processes()
            await made.check(regex("a0"))
            assert processes()

    run(test)


def test_the_names_of_special_tokens_are_known() -> None:
    async def test() -> None:
        async with trials() as made:
            await made.check(StructuredOutput("grammar", "start: <|call|>"))
            error = await refusal(made, StructuredOutput("grammar", "start: <|other|>"))
            assert "<|other|>" in str(error)

    run(test)


def test_a_killed_process_refuses_no_text() -> None:
    async def test() -> None:
        async with trials(timeout_s=60.0) as made:
            await made.check(regex("a"))
            (process,) = processes()
            stop(process)
            check = asyncio.create_task(made.check(regex("b")))
            await asyncio.sleep(0.05)
            process.kill()
            await check

    run(test)


def test_a_text_that_is_too_slow_ends_its_process() -> None:
    async def test() -> None:
        async with trials(timeout_s=0.5) as made:
            await made.check(regex("a"))
            (process,) = processes()
            error = await refusal(made, slow(900_000))  # for seconds on any machine
            assert "takes more than 0.5 s" in str(error)
            assert not process.is_running()

    run(test)


def test_a_busy_machine_refuses_no_text_for_ever() -> None:
    async def test() -> None:
        async with trials() as made:
            assert await settled(made, regex("a")) is None
            (process,) = processes()
            stop(process)
            error = await refusal(made, regex("b"))
            assert isinstance(error, OverloadedError)
            assert "too busy to compile guided_regex within 1 s" in str(error)
            assert not process.is_running()
            assert await settled(made, regex("b")) is None

    run(test)


def test_clients_that_leave_leave_nothing() -> None:
    async def test() -> None:
        async with trials() as made:
            await made.check(regex("a"))
            others = [slow(number) for number in range(20)]
            checks = [asyncio.create_task(made.check(one)) for one in others]
            await asyncio.sleep(0.05)
            for check in checks:
                check.cancel()
            await asyncio.gather(*checks, return_exceptions=True)
            began_s = time.monotonic()
            await made.check(regex("b"))  # waits for the one that had begun, at most
            assert time.monotonic() - began_s < 10 * TIMEOUT_S

    run(test)


def test_one_client_of_several_leaves() -> None:
    async def test() -> None:
        async with trials() as made:
            slow = asyncio.create_task(made.check(SLOW))
            await asyncio.sleep(0)
            first, second = (asyncio.create_task(made.check(regex("b"))) for _ in range(2))
            await asyncio.sleep(0)
            first.cancel()
            await second
            with pytest.raises(RequestError):
                await slow

    run(test)


def test_the_end_is_an_error_for_those_that_wait() -> None:
    async def test() -> None:
        async with trials() as made:
            checks = [asyncio.create_task(made.check(one)) for one in (SLOW, regex("b"))]
            await asyncio.sleep(0.05)
            await made.close()
            for check in checks:
                with pytest.raises(EngineDeadError):
                    await check
            with pytest.raises(EngineDeadError):
                await made.check(regex("c"))

    run(test)


def test_too_many_at_once_are_refused() -> None:
    async def test() -> None:
        async with trials() as made:
            checks = [asyncio.create_task(made.check(regex(f"a{i}"))) for i in range(257)]
            await asyncio.sleep(0)
            results = await asyncio.gather(*checks, return_exceptions=True)
            assert sum(isinstance(one, OverloadedError) for one in results) == 1
            assert sum(one is None for one in results) == 256

    run(test)


def test_nothing_is_started_without_structure() -> None:
    async def test() -> None:
        async with trials():
            assert not processes()

    run(test)

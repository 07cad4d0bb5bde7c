"""Resolvers are asked once for a name and any number of requests, and what they find is limited."""

import asyncio
import contextvars
import errno
import gc
import os
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from corun.runtime import file_calls
from corun.runtime.adapters.info import AdapterInfo
from corun.runtime.adapters.names import FAILED
from corun.runtime.config.engine import EngineConfig
from corun.runtime.engine.client import ThreadClient
from corun.runtime.errors import AdapterError, AdminKeyNeededError, ConfigError, CorunError, UnknownModelError
from corun.runtime.frontend.async_engine import AsyncEngine
from corun.runtime.frontend.hub_budget import HubBudget, bytes_of_adapters
from corun.runtime.frontend.lora_client import LoraClient
from corun.runtime.frontend.lora_resolvers import DirectoryResolver, HubResolver, make_resolver
from corun.runtime.frontend.outputs import LoRARequest
from corun.runtime.frontend.requester import IS_ADMIN
from corun.runtime.limits import HubLimits
from support.adapter_files import write_adapter
from support.fake_core import FACTORY


class Resolver:
    """Knows one name, once the test lets it answer."""

    def __init__(self, name: str, path: str) -> None:
        self.asked: list[tuple[str, str]] = []
        self.may_answer = asyncio.Event()
        self._found = LoRARequest(name, 0, path)

    async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest | None:
        self.asked.append((base_model_name, lora_name))
        await self.may_answer.wait()
        return self._found if lora_name == self._found.lora_name else None


Test = Callable[[AsyncEngine, Resolver], Coroutine[Any, Any, None]]


@pytest.fixture
def run(tokenizer_dir: str) -> Callable[..., None]:
    def run_with(test: Test, path: str = "/") -> None:
        async def body() -> None:
            client = ThreadClient(EngineConfig(model=tokenizer_dir), factory=FACTORY)
            async with AsyncEngine.from_client(client) as engine:
                resolver = Resolver("found", path)
                engine.add_lora_resolver(resolver)
                await test(engine, resolver)

        asyncio.run(body())

    return run_with


async def _ask(engine: AsyncEngine, name: str) -> str:
    outputs = [output async for output in engine.generate("abc", lora_request=name)]
    return outputs[-1].outputs[0].text


def test_many_wait_for_one_answer(run: Callable[..., None]) -> None:
    async def test(engine: AsyncEngine, resolver: Resolver) -> None:
        waiting = [asyncio.create_task(_ask(engine, "found")) for _ in range(5)]
        await asyncio.sleep(0.05)
        waiting[0].cancel()  # the first request is cancelled
        resolver.may_answer.set()
        assert len({await one for one in waiting[1:]}) == 1
        assert resolver.asked == [(engine.get_model_info().name, "found")]
        await _ask(engine, "found")
        assert len(resolver.asked) == 1

    run(test)


def test_no_lock_of_an_unloaded_adapter_is_kept(run: Callable[..., None]) -> None:
    def num_locks() -> int:
        return sum(type(one) is asyncio.Lock for one in gc.get_objects())

    async def test(engine: AsyncEngine, resolver: Resolver) -> None:
        before = num_locks()
        for number in range(1, 21):
            await engine.add_lora(LoRARequest(f"adapter-{number}", number, "/"))
            await engine.remove_lora(f"adapter-{number}")
        assert num_locks() == before

    run(test)


def test_what_is_unknown_stays_so_for_a_while(tokenizer_dir: str) -> None:
    async def test() -> None:
        now_s = 1000.0
        client = ThreadClient(EngineConfig(model=tokenizer_dir), factory=FACTORY)
        loras, resolver = LoraClient(client, lambda: now_s), Resolver("found", "/")
        loras.add_resolver(resolver)
        resolver.may_answer.set()
        for now_s, num_asked in ((1000.0, 1), (1009.9, 1), (1010.1, 2)):  # noqa: B007
            with pytest.raises(UnknownModelError):
                await loras.resolve("lost")
            assert len(resolver.asked) == num_asked

    asyncio.run(test())


class Failing:
    """Fails with a reason."""

    def __init__(self, error: CorunError) -> None:
        self.num_asked = 0
        self._error = error

    async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest | None:
        self.num_asked += 1
        raise self._error


def test_one_that_cannot_tell_keeps_nobody_from_asking_another(run: Callable[..., None]) -> None:
    async def test(engine: AsyncEngine, resolver: Resolver) -> None:
        failing = Failing(UnknownModelError("the hub cannot be reached"))
        engine.add_lora_resolver(failing)
        resolver.may_answer.set()
        await _ask(engine, "found")
        assert failing.num_asked == 0
        for _ in range(2):
            with pytest.raises(UnknownModelError, match="cannot be reached"):
                await _ask(engine, "lost")
        assert failing.num_asked == 1

    run(test)


def test_what_was_refused_is_asked_for_again_later(tokenizer_dir: str) -> None:
    """Its files may have been corrected."""

    async def test() -> None:
        now_s = 1000.0
        client = ThreadClient(EngineConfig(model=tokenizer_dir), factory=FACTORY)
        loras, failing = LoraClient(client, lambda: now_s), Failing(AdapterError("no rank"))
        loras.add_resolver(failing)
        for now_s, num_asked in ((1000.0, 1), (1009.9, 1), (1010.1, 2)):  # noqa: B007
            with pytest.raises(AdapterError, match="no rank"):
                await loras.find("found")
            assert failing.num_asked == num_asked
            loras.directory.update([AdapterInfo("found", "/", FAILED, "no rank", 0, 0, "")])

    asyncio.run(test())


@pytest.mark.parametrize("name", ["../found", "/found", "found/..", "a\0b", "x" * 9999, ""])
def test_nobody_is_asked_for_what_no_adapter_can_be_called(tokenizer_dir: str, name: str) -> None:
    async def test() -> None:
        client = ThreadClient(EngineConfig(model=tokenizer_dir), factory=FACTORY)
        loras, resolver = LoraClient(client), Resolver("found", "/")
        loras.add_resolver(resolver)
        resolver.may_answer.set()
        await loras.find(name)
        assert not resolver.asked

    asyncio.run(test())


def test_a_directory_that_is_not_there_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--lora-resolver directory:.*no such directory"):
        make_resolver(f"directory:{tmp_path / 'no'}")


def test_a_hub_says_in_one_line_that_it_is_offline() -> None:
    """The tests run offline (HF_HUB_OFFLINE)."""
    with pytest.raises(UnknownModelError, match="offline mode is enabled") as caught:
        asyncio.run(HubResolver().resolve_lora("base", "acme/no-such-adapter"))
    assert "\n" not in str(caught.value)


def test_only_an_administrator_has_any_adapter_of_the_hub_fetched(tokenizer_dir: str) -> None:
    async def test() -> None:
        client = ThreadClient(EngineConfig(model=tokenizer_dir), factory=FACTORY)
        loras, other = LoraClient(client), Resolver("of/another", "/")
        loras.add_resolver(HubResolver())
        loras.add_resolver(HubResolver("acme"))
        loras.add_resolver(other)
        other.may_answer.set()

        def find(name: str, *, is_admin: bool) -> asyncio.Task[None]:
            context = contextvars.copy_context()
            context.run(IS_ADMIN.set, is_admin)
            return asyncio.create_task(loras.find(name), context=context)

        for _ in range(2):
            with pytest.raises(AdminKeyNeededError, match="only for a request with an administrator's key"):
                await find("some/adapter", is_admin=False)
            with pytest.raises(UnknownModelError, match="offline"):  # what others got is not kept
                await find("some/adapter", is_admin=True)
        with pytest.raises(UnknownModelError, match="offline"):
            await find("acme/adapter", is_admin=False)
        await find("no-name-of-the-hub", is_admin=False)
        assert [name for _, name in other.asked] == [
            "some/adapter",
            "some/adapter",
            "acme/adapter",
            "no-name-of-the-hub",
        ]

    asyncio.run(test())


def test_what_cannot_be_loaded_is_not_tried_again_at_once(run: Callable[..., None]) -> None:
    async def test(engine: AsyncEngine, resolver: Resolver) -> None:
        resolver.may_answer.set()
        for _ in range(2):
            with pytest.raises(AdapterError, match="no directory"):
                await _ask(engine, "found")
        assert len(resolver.asked) == 1

    run(test, "/broken")


def test_a_directory_that_cannot_be_read_is_not_said_to_hold_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolver = make_resolver(f"directory:{tmp_path}")
    assert asyncio.run(resolver.resolve_lora("base", "x" * 256)) is None

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "stat", refuse)
    with pytest.raises(UnknownModelError, match=r"cannot look for adapter 'a': .*Permission denied"):
        asyncio.run(resolver.resolve_lora("base", "a"))


_SOON_S = 20.0


def test_a_directory_that_does_not_answer_holds_few_threads_for_any_number_of_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_calls, "_SLICE_S", 0.01)
    monkeypatch.setattr(file_calls.FILES, "timeout_s", 0.1)
    dead, alive = tmp_path / "dead", tmp_path / "alive"
    write_adapter(alive / "sql")
    answers, stuck, stat = threading.Event(), list[str](), os.stat

    def dead_stat(path: str | Path, **options: bool) -> os.stat_result:
        if str(path).startswith(str(dead)):
            stuck.append(str(path))
            assert answers.wait(_SOON_S)
        return stat(path, **options)

    monkeypatch.setattr(os, "stat", dead_stat)

    async def run() -> None:
        resolver = DirectoryResolver(dead)
        asked = [asyncio.ensure_future(resolver.resolve_lora("base", str(number))) for number in range(200)]
        for one in await asyncio.gather(*asked, return_exceptions=True):
            assert isinstance(one, UnknownModelError) and "does not answer" in str(one)
        monkeypatch.setattr(file_calls.FILES, "timeout_s", _SOON_S)
        found = await DirectoryResolver(alive).resolve_lora("base", "sql")
        assert found is not None and found.lora_path == str(alive / "sql")

    asyncio.run(asyncio.wait_for(run(), _SOON_S))
    assert 0 < len(stuck) <= 8
    answers.set()


LIMITS = HubLimits(max_adapter_bytes=100, max_adapters=2, max_cache_bytes=150)


@pytest.fixture
def served() -> set[str]:
    return set()


@pytest.fixture
def budget(served: set[str]) -> HubBudget:
    return HubBudget(LIMITS, served.__contains__)


def add_repository(cache: Path, name: str, num_bytes: int, *, config: bool = True) -> None:
    """As the hub's library lays it out."""
    blobs, snapshot = (cache / f"models--{name}" / one for one in ("blobs", "snapshots/abc"))
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    (blobs / "weights").write_bytes(bytes(num_bytes))
    (blobs / "config").write_bytes(b"{}" if config else b"")
    (snapshot / "adapter_model.safetensors").symlink_to(blobs / "weights")
    if config:
        (snapshot / "adapter_config.json").symlink_to(blobs / "config")


def fetch(budget: HubBudget, name: str, num_bytes: int, cache: Path) -> None:
    with budget.reserved(name, num_bytes, cache):
        pass


def test_the_size_of_one(budget: HubBudget) -> None:
    budget.check_size("a", 100)
    with pytest.raises(AdapterError, match=r"'a' has 101 bytes.*at most 100.*--max-hub-adapter-mib"):
        budget.check_size("a", 101)


def test_the_number(budget: HubBudget, served: set[str], tmp_path: Path) -> None:
    for name in ("a", "b", "a"):
        fetch(budget, name, 0, tmp_path)
        served.add(name)
    with pytest.raises(AdapterError, match=r"'c' is not fetched: 2 adapters.*--max-hub-adapters"):
        fetch(budget, "c", 0, tmp_path)
    served.remove("b")  # it is unloaded
    fetch(budget, "c", 0, tmp_path)


def test_fetches_that_run_count(budget: HubBudget, tmp_path: Path) -> None:
    with (
        budget.reserved("a", 60, tmp_path),
        budget.reserved("a", 30, tmp_path),
        budget.reserved("b", 60, tmp_path),
    ):
        with pytest.raises(AdapterError, match="--max-hub-adapters"):
            fetch(budget, "c", 0, tmp_path)
        with pytest.raises(AdapterError, match="--max-hub-gib"):
            fetch(budget, "b", 1, tmp_path)
    fetch(budget, "c", 100, tmp_path)


def test_a_fetch_that_fails_takes_nothing(budget: HubBudget, tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        with pytest.raises(ValueError, match="no"), budget.reserved(name, 100, tmp_path):
            raise ValueError("no")
    for name in ("d", "e"):
        fetch(budget, name, 100, tmp_path)


def test_the_bytes_in_the_cache(tmp_path: Path) -> None:
    add_repository(tmp_path, "adapter", 100)
    add_repository(tmp_path, "base", 1_000_000, config=False)
    used = bytes_of_adapters(tmp_path)
    assert 102 <= used < 1_000_000
    limits = HubLimits(max_adapter_bytes=100, max_cache_bytes=used + 10)
    budget = HubBudget(limits, lambda name: True)
    fetch(budget, "a", 10, tmp_path)
    with pytest.raises(AdapterError, match=r"its 11 bytes.*are more than.*--max-hub-gib"):
        fetch(budget, "b", 11, tmp_path)
    fetch(budget, "c", 0, tmp_path)  # its files are in the cache


def test_a_link_to_nothing_has_few_bytes(tmp_path: Path) -> None:
    add_repository(tmp_path, "adapter", 1_000_000)
    (tmp_path / "models--adapter" / "blobs" / "weights").unlink()
    (tmp_path / "models--adapter" / "blobs" / "shared").symlink_to(tmp_path / "nothing")
    assert bytes_of_adapters(tmp_path) < 1_000_000
    assert bytes_of_adapters(tmp_path / "nothing") == 0

"""vLLM as an engine type: adapters, refused servers, and states."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from corun.runtime.cluster.engine_types.engine_type import SentRecord
from corun.runtime.cluster.engine_types.vllm import VllmApi, VllmEngineType
from corun.runtime.cluster.http.calls import make_session
from corun.runtime.cluster.wire import AdapterEntry, EngineState
from corun.runtime.server.errors import HttpError
from support.adapter_files import write_adapter
from support.agents import KEY, serving
from support.gateways import entry_of
from support.recorded_vllm import BASE, RecordedVllm, VllmOptions, vllm_card

ENGINE_TYPE = VllmEngineType()
DIGESTS = ("0" * 64, "1" * 64)
Work = Callable[[RecordedVllm, VllmApi], Awaitable[None]]


def with_vllm(work: Work, **options: Any) -> None:
    async def run() -> None:
        server = RecordedVllm(VllmOptions(**options))
        async with serving(server.app()) as server.url, make_session(KEY) as session:
            await work(server, VllmApi(session, server.url))

    asyncio.run(run())


async def states_of(server: RecordedVllm, sent: SentRecord, number: int) -> list[EngineState]:
    found: list[EngineState] = []
    async with make_session(KEY) as session:
        states = ENGINE_TYPE.states(session, vllm_card(server.url), sent)
        async with contextlib.aclosing(states):
            async for state in states:
                found.append(state)
                sent.last_number += 1
                if len(found) == number:
                    return found
    raise AssertionError


def test_a_name_with_other_content_has_another_name_there(tmp_path: Path) -> None:
    async def work(server: RecordedVllm, api: VllmApi) -> None:
        paths = [write_adapter(tmp_path / str(number), num_bytes=1000) for number in range(2)]
        first, second = (entry_of("sql", number + 1, digest=digest) for number, digest in enumerate(DIGESTS))
        assert await api.load(first, str(paths[0])) == "sql@" + "0" * 16
        assert await api.load(first, str(paths[0])) == "sql@" + "0" * 16  # loaded already
        await api.load(entry_of("sqlx", digest=DIGESTS[0]), str(paths[0]))
        assert await api.load(second, str(paths[1])) == "sql@" + "1" * 16
        assert set(server.loaded) == {"sql@" + "1" * 16, "sqlx@" + "0" * 16}
        await api.unload("sql")
        await api.unload("sql")  # unloaded already
        assert set(server.loaded) == {"sqlx@" + "0" * 16}
        with pytest.raises(HttpError, match="No adapter found for") as refused:
            await api.load(second, str(tmp_path / "nowhere"))
        assert (refused.value.status, refused.value.code) == (404, "model_not_found")

    with_vllm(work)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"has_lora": False}, "it serves no LoRA adapters: start it with --enable-lora"),
        ({"updates_loras": False}, "start it with VLLM_ALLOW_RUNTIME_LORA_UPDATING=True"),
        ({"key": "another"}, "does not take the cluster's key as its --api-key"),
    ],
)
def test_servers_that_cannot_be_engines_are_refused(options: dict[str, Any], words: str) -> None:
    async def work(server: RecordedVllm, api: VllmApi) -> None:
        async with make_session(KEY) as session:
            with pytest.raises(HttpError, match=words):
                await ENGINE_TYPE.profile(session, vllm_card(server.url))

    with_vllm(work, **options)


def test_a_profile_has_what_the_server_reports_and_what_was_given() -> None:
    async def work(server: RecordedVllm, api: VllmApi) -> None:
        card = vllm_card(server.url)
        async with make_session(KEY) as session:
            profile = await ENGINE_TYPE.profile(session, card)
            (base,) = await ENGINE_TYPE.base_cards(session, card)
        assert (profile.model, profile.max_model_len, base.id) == (BASE, 512, BASE)
        assert (profile.block_size, profile.max_num_seqs) == (128, 16)
        assert not profile.is_measured

    with_vllm(work, key=KEY)


def test_states_say_what_metrics_and_the_record_do() -> None:
    async def work(server: RecordedVllm, api: VllmApi) -> None:
        entries: dict[str, AdapterEntry] = {
            name: entry_of(name, rank=rank) for name, rank in (("a", 8), ("b", 64), ("c", 16))
        }
        sent = SentRecord("g", lambda: entries)
        for name in ("a", "b", "c", "gone"):
            sent.use(name)
        server.running.update({"a@" + "0" * 16: 2, BASE: 3})
        first, second, third = await states_of(server, sent, 3)
        assert first.load is not None and first.load.num_running_by_rank == {8: 5}
        assert first.load.num_waiting_by_rank == {} and first.load.total_kv_tokens == 838784
        assert {one.name: one.level for one in first.adapters} == {"a": "device", "b": "disk", "c": "device"}
        assert (second.adapters, second.removed) == ((), ())
        assert [one.beat for one in (first, second, third)] == [1, 2, 3]
        # A state includes requests sent before the previous poll; later ones may be missing.
        accepted = [one.accepted and one.accepted["g"].last for one in (first, second, third)]
        assert accepted == [0, 0, 1]

    with_vllm(work, max_loras=1)

"""An engine's state for routers: complete at first, then changes, always with a heartbeat.

Each request of a gateway is included once, in any order, and within bounds.
"""

import itertools
import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import psutil
import pytest
from corun.runtime.engine.messages import EngineStats, MachineReport
from corun.runtime.engine_state import Accepted, EngineLoadState, EngineProfile, EngineState
from corun.runtime.server.access import Access, Keys
from corun.runtime.server.errors import HttpError
from corun.runtime.server.open_requests import GatewayLedger, GatewayRequest
from corun.runtime.sim.papers.machines import MACHINES
from support.fake_engine import FakeEngine, make_adapter
from support.latency_engine import LatencyServer, LatencySettings, save_tiny_adapter
from support.profiles import PROFILE

LOAD = EngineLoadState(
    num_running_by_rank={0: 2, 8: 1},
    num_waiting_by_rank={64: 3},
    queued_prefill_tokens=500,
    running_context_tokens=900,
    free_kv_tokens=1000,
    total_kv_tokens=1600,
    measured_over_predicted=1.5,
)


@contextmanager
def listening(http: httpx.Client) -> Iterator[Iterator[EngineState]]:
    with http.stream("GET", "/v1/engine_state") as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        yield _states(response)


def _states(response: httpx.Response) -> Iterator[EngineState]:
    for line in response.iter_lines():
        if line:
            data = line.removeprefix("data: ").encode()
            state = msgspec.json.decode(data, type=EngineState)
            assert msgspec.json.decode(msgspec.json.encode(state)) == json.loads(data)
            yield state


def tell(engine: FakeEngine, load: EngineLoadState | None = None, *names: str) -> None:
    """Publish something of the engine, as its front end receives it."""
    if load is not None:
        engine.stats = EngineStats(load=load)
    engine.num_requests_received = engine.num_requests_sent
    engine.watches.changed(names)


def until(states: Iterator[EngineState], condition: Callable[[EngineState], bool]) -> EngineState:
    return next(state for state in states if condition(state))


def test_the_first_state_is_whole(http: httpx.Client, engine: FakeEngine) -> None:
    tell(engine, LOAD)
    engine.num_heartbeats = 12
    with listening(http) as states:
        first = next(states)
    assert (first.beat, first.is_ready, first.load) == (12, True, LOAD)
    assert first.accepted == {}
    assert [(one.name, one.level, one.rank) for one in first.adapters] == [
        ("digits", "host", 64),
        ("upper", "device", 8),
    ]
    assert first.adapters[0].digest == engine.adapters["digits"].version
    with listening(http) as states:
        assert next(states).incarnation == first.incarnation


def test_later_ones_say_what_has_changed(http: httpx.Client, engine: FakeEngine) -> None:
    tell(engine, LOAD)
    with listening(http) as states:
        next(states)
        silent = next(states)
        assert (silent.load, silent.adapters, silent.removed, silent.accepted) == (None, (), (), None)
        changed = msgspec.structs.replace(LOAD, queued_prefill_tokens=501)
        engine.adapters["more"] = make_adapter("more", level="disk")
        del engine.adapters["upper"]
        engine.adapters["digits"] = msgspec.structs.replace(engine.adapters["digits"], state="failed")
        tell(engine, changed, "more", "upper", "digits", "broken")
        news = until(states, lambda state: state.load is not None)
        assert news.load == changed
        assert [one.name for one in news.adapters] == ["more"]
        assert news.removed == ("digits", "upper")


def test_there_are_not_more_than_ten_a_second_and_not_fewer_than_two(
    http: httpx.Client, engine: FakeEngine
) -> None:
    ended = threading.Event()

    def talk() -> None:
        number = 0
        while not ended.wait(0.005):
            number += 1
            tell(engine, msgspec.structs.replace(LOAD, queued_prefill_tokens=number))

    talker = threading.Thread(target=talk)
    with listening(http) as states:
        next(states)
        began_s = time.monotonic()
        talker.start()
        for _ in range(5):
            until(states, lambda state: state.load is not None)
        assert time.monotonic() - began_s > 0.4
        ended.set()
        talker.join()
        heard = iter(states)
        for _ in range(3):
            engine.num_heartbeats += 1
            until(heard, lambda state: state.beat == engine.num_heartbeats)


def test_its_head_has_an_end(http: httpx.Client) -> None:
    answer = http.head("/v1/engine_state")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/event-stream")


def test_it_ends_with_the_server(supervised: Callable[..., Any]) -> None:
    server = supervised(drain_timeout_s=1.0)
    with httpx.Client(base_url=server.url, timeout=10) as http, listening(http) as states:
        assert next(states).is_ready
        server.signal()
        for _ in states:
            pass  # until the stream ends, as it should
    assert server.join() == 0


def test_one_that_hangs_is_not_ready_until_it_goes_on(http: httpx.Client, engine: FakeEngine) -> None:
    with listening(http) as states:
        engine.stall(31)
        assert not until(states, lambda state: not state.is_ready).is_ready
        engine.stall(0)
        assert until(states, lambda state: state.is_ready).is_ready


def test_one_that_drains_is_not_ready(server: Any, http: httpx.Client, engine: FakeEngine) -> None:
    with listening(http) as states:
        assert next(states).is_ready
        server.state.draining = True
        assert not until(states, lambda state: not state.is_ready).is_ready


def test_requests_of_gateways_are_in_the_state_that_knows_them(
    http: httpx.Client, engine: FakeEngine
) -> None:
    engine.held.set()
    engine.hold_after_first = False
    body = {"prompt": ["a", "b"], "max_tokens": 3}
    headers = {"x-corun-gateway": "g:7"}
    with listening(http) as states:
        next(states)
        request = threading.Thread(
            target=lambda: httpx.post(f"{http.base_url}/v1/completions", json=body, headers=headers)
        )
        request.start()
        deadline_s = time.monotonic() + 10
        while engine.num_requests_sent < 2:
            assert time.monotonic() < deadline_s
            time.sleep(0.005)
        assert next(states).accepted is None  # the engine has not published them
        tell(engine, LOAD)
        news = until(states, lambda state: state.accepted is not None)
        assert news.load == LOAD
        assert news.accepted is not None
        assert news.accepted["g"].last == 7
        engine.held.clear()
        request.join()


def test_a_request_that_is_refused_is_in_the_state(http: httpx.Client, engine: FakeEngine) -> None:
    for number, headers in enumerate([{"x-corun-gateway": "r:1"}, {"x-corun-gateway": "r:2"}]):
        body = {"model": "no-such-model", "prompt": "a"} if number else {"prompt": ""}
        assert http.post("/v1/completions", json=body, headers=headers).status_code >= 400
    with listening(http) as states:
        accepted = next(states).accepted
    assert accepted is not None
    assert accepted["r"] == Accepted(last=2)


def test_a_malformed_number_is_refused(http: httpx.Client, engine: FakeEngine) -> None:
    answer = http.post("/v1/completions", json={"prompt": "a"}, headers={"x-corun-gateway": "g:zero"})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "x-corun-gateway"
    assert not engine.seen


def test_both_want_a_key(start_server: Callable[..., Any]) -> None:
    server = start_server(FakeEngine(), access=Access(Keys(["secret"])))
    for path in ("/v1/engine_state", "/v1/profile"):
        assert httpx.get(server.url + path).status_code == 401
    answer = httpx.get(server.url + "/v1/profile", headers={"authorization": "Bearer secret"})
    assert answer.status_code == 200


@pytest.mark.parametrize("is_measured", [True, False])
def test_the_profile(http: httpx.Client, engine: FakeEngine, is_measured: bool) -> None:
    engine.machine = MachineReport(PROFILE.model, 5e8, 64, is_measured)
    profile = msgspec.json.decode(http.get("/v1/profile").content, type=EngineProfile)
    assert profile.machine == PROFILE.model
    assert profile.max_num_batched_tokens == engine.get_model_info().max_num_batched_tokens
    assert (profile.file_bytes_per_s, profile.is_measured) == (5e8, is_measured)
    assert (profile.dtype, profile.max_num_seqs, profile.block_size) == ("float32", 256, 16)


MACHINE = MACHINES["a40-llama7b"]
TIMEOUT_S = 20.0


@contextmanager
def states_of(url: str) -> Iterator[Iterator[EngineState]]:
    with httpx.stream("GET", f"{url}/v1/engine_state", timeout=TIMEOUT_S) as response:
        lines = (line for line in response.iter_lines() if line)
        yield (msgspec.json.decode(line.removeprefix("data: "), type=EngineState) for line in lines)


@pytest.fixture(scope="module")
def served() -> Iterator[LatencyServer]:
    with LatencyServer(LatencySettings(own_process=True, slowness=3.0)) as server:
        yield server


def load(server: LatencyServer, name: str, path: Path) -> None:
    body = {"lora_name": name, "lora_path": str(path)}
    httpx.post(f"{server.url}/v1/load_lora_adapter", json=body).raise_for_status()


def test_a_stopped_engine_has_no_beat_and_its_front_lives(served: LatencyServer) -> None:
    (engine,) = psutil.Process(served.pid).children()
    with states_of(served.url) as states:
        next(states)
        os.kill(engine.pid, signal.SIGSTOP)
        try:
            time.sleep(0.1)
            heard = [next(states) for _ in range(5)]
            assert len({state.beat for state in heard[1:]}) == 1
            assert httpx.get(f"{served.url}/health").status_code == 200
        finally:
            os.kill(engine.pid, signal.SIGCONT)
        stopped_at = heard[-1].beat
        assert any(state.beat > stopped_at for state in itertools.islice(states, 40))


def test_a_request_from_its_number_to_its_end(served: LatencyServer, tmp_path: Path) -> None:
    load(served, "a", save_tiny_adapter(tmp_path, rank=16))
    body = {"model": "a", "prompt": [5] * 900, "max_tokens": 8, "ignore_eos": True, "stream": True}
    headers = {"x-corun-gateway": "g:1"}
    with states_of(served.url) as states:
        first = next(states)
        assert first.load is not None
        assert first.load.num_running_by_rank == {}
        url = f"{served.url}/v1/completions"
        with httpx.stream("POST", url, json=body, headers=headers, timeout=TIMEOUT_S) as response:
            news = next(state for state in states if state.accepted)
            assert news.accepted == {"g": Accepted(last=1)}
            assert news.load is not None
            at_work = (*news.load.num_running_by_rank.items(), *news.load.num_waiting_by_rank.items())
            assert at_work == ((16, 1),)
            response.read()
        ended = next(state for state in states if state.load and not state.load.num_running_by_rank)
    assert ended.load is not None
    assert ended.load.free_kv_tokens == MACHINE.num_blocks * MACHINE.block_size
    assert 2.0 < ended.load.measured_over_predicted < 6.0  # three times slower, and late


def test_reloads_have_other_digests(served: LatencyServer, tmp_path: Path) -> None:
    path = save_tiny_adapter(tmp_path, rank=8, seed=1)
    load(served, "b", path)
    with states_of(served.url) as states:
        before = next(one for one in next(states).adapters if one.name == "b")
        assert (before.rank, before.level) == (8, "host")
        save_tiny_adapter(tmp_path, rank=32, seed=2)
        body = {"lora_name": "b", "lora_path": str(path), "load_inplace": True}
        httpx.post(f"{served.url}/v1/load_lora_adapter", json=body).raise_for_status()
        after = next(one for state in states for one in state.adapters if one.name == "b")
        assert after.rank == 32
        assert after.digest != before.digest
        body = {"lora_name": "b"}
        httpx.post(f"{served.url}/v1/unload_lora_adapter", json=body).raise_for_status()
        assert next(state.removed for state in states if state.removed) == ("b",)


def test_its_profile_is_the_machines(served: LatencyServer) -> None:
    answer = httpx.get(f"{served.url}/v1/profile")
    profile = msgspec.json.decode(answer.content, type=EngineProfile)
    assert profile.machine == MACHINE.model
    assert profile.is_measured
    assert profile.adapter_bytes_per_rank == MACHINE.adapter_bytes_per_rank
    assert (profile.max_num_seqs, profile.block_size) == (MACHINE.max_num_seqs, MACHINE.block_size)


def opened(ledger: GatewayLedger, text: str) -> GatewayRequest:
    request = ledger.open([(b"host", b"x"), (b"x-corun-gateway", text.encode())])
    assert request is not None
    return request


def answer(ledger: GatewayLedger, *texts: str) -> None:
    for text in texts:
        opened(ledger, text).ended()


def test_others_have_no_number() -> None:
    ledger = GatewayLedger()
    assert ledger.open([(b"host", b"x")]) is None
    assert ledger.accept_known(100) == {}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "g",
        "g:",
        ":1",
        "g:0",
        "g:01",
        "g:-1",
        "g:1.5",
        "g:1,g:2",
        "g g:1",
        "ü:1",
        "g:1" + "0" * 15,
        "x" * 65 + ":1",
    ],
)
def test_what_is_no_number_is_refused(text: str) -> None:
    with pytest.raises(HttpError, match="must be ID:N") as caught:
        opened(GatewayLedger(), text)
    assert caught.value.status == 400


def test_a_request_is_in_the_state_that_knows_its_engine_requests() -> None:
    ledger = GatewayLedger()
    opened(ledger, "g:1").expects(["a"])
    ledger.sent("a", 4)
    ledger.sent("not of a gateway", 4)
    assert ledger.accept_known(3) == {}
    changes = ledger.num_changes
    assert ledger.accept_known(4) == {"g": Accepted(last=1)}
    assert ledger.num_changes == changes + 1
    ledger.accept_known(5)
    assert ledger.num_changes == changes + 1


def test_all_prompts_must_have_been_sent() -> None:
    ledger = GatewayLedger()
    opened(ledger, "g:1").expects(["a-0", "a-1"])
    ledger.sent("a-1", 1)
    assert ledger.accept_known(10) == {}
    ledger.sent("a-0", 2)
    assert ledger.accept_known(10) == {"g": Accepted(last=1)}


def test_what_was_answered_is_not_waited_for() -> None:
    ledger = GatewayLedger()
    answer(ledger, "g:1")  # refused before it was sent to the engine
    request = opened(ledger, "g:2")
    request.expects(["a", "b"])
    ledger.sent("a", 9)
    request.ended()
    ledger.sent("b", 9)  # too late
    assert ledger.accept_known(0) == {"g": Accepted(last=2)}
    assert ledger.accept_known(9) == {"g": Accepted(last=2)}


def test_requests_may_come_in_any_order() -> None:
    ledger = GatewayLedger()
    answer(ledger, "a:3", "a:5", "b:1")
    accepted = {"a": Accepted(last=5, missing=(1, 2, 4)), "b": Accepted(last=1)}
    assert ledger.accept_known(0) == accepted
    answer(ledger, "a:2", "a:4")
    assert ledger.accept_known(0)["a"] == Accepted(last=5, missing=(1,))
    changes = ledger.num_changes
    answer(ledger, "a:4")
    assert ledger.num_changes == changes


def test_what_is_long_ago_is_taken_to_be_in_it() -> None:
    ledger = GatewayLedger()
    rng = random.Random(0)
    numbers = [*range(1, 5001)]
    lost = {rng.choice(numbers) for _ in range(500)} | {4999}
    for number in numbers:
        if number not in lost:
            answer(ledger, f"g:{number}")
        (accepted,) = ledger.accept_known(0).values() or (Accepted(last=0),)
        assert set(accepted.missing) <= lost
        assert len(accepted.missing) <= 1024
        assert all(accepted.last - 1025 < one < accepted.last for one in accepted.missing)
    assert accepted.missing == tuple(sorted(one for one in lost if one >= 5000 - 1024))
    answer(ledger, f"g:{10**14}")
    (accepted,) = ledger.accept_known(0).values()
    assert len(accepted.missing) == 1024


def test_the_gateway_that_is_silent_the_longest_is_forgotten() -> None:
    ledger = GatewayLedger()
    answer(ledger, *(f"g{index}:1" for index in range(64)), "g0:2", "new:1")
    accepted = ledger.accept_known(0)
    assert len(accepted) == 64
    assert "g1" not in accepted
    assert accepted["g0"].last == 2

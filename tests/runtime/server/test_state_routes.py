"""An engine's state for routers: complete at first, then changes, always with a heartbeat."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import msgspec
import pytest
from corun.runtime.engine.messages import EngineStats, MachineReport
from corun.runtime.engine_state import Accepted, EngineLoadState, EngineProfile, EngineState
from corun.runtime.server.access import Access, Keys
from support.fake_engine import FakeEngine, make_adapter
from support.profiles import PROFILE

LOAD = EngineLoadState(
    num_running_by_rank={0: 2, 8: 1},
    num_waiting_by_rank={64: 3},
    queued_prefill_tokens=500,
    running_context_tokens=900,
    free_kv_tokens=1000,
    promised_kv_tokens=100,
    total_kv_tokens=1600,
    queued_s=0.25,
    link_backlog_bytes=77,
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

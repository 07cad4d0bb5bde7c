"""The state of real processes for routers: a stopped engine behind a running front end."""

import itertools
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import msgspec
import psutil
import pytest
from corun.runtime.engine_state import Accepted, EngineProfile, EngineState
from corun.runtime.sim.papers.machines import MACHINES
from support.latency_engine import LatencyServer, LatencySettings, save_tiny_adapter

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

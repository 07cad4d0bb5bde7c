"""The waits of requests for memory, adapters and KV, in HTTP, in the log and in /metrics."""

import random
import re
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from corun.profiles.curve import Curve
from corun.runtime.config.demo import with_demo
from corun.runtime.config.engine import EngineConfig
from support.demo_answers import BASE
from support.model_profiles import Figures, save_made_up_profile
from support.serving import Served, wait_until

MAX_MODEL_LEN = 512
# KV of 1,760 tokens. Pinned, ``reverse`` takes 397 of them, which no quota knows; ``add`` would
# take 642.
MEMORY_GIB = 0.0021
LINK_GIB_PER_S = 0.01
MAX_ROUNDS = 10  # of prompts that evict earlier ones
Timing = dict[str, Any]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    values: dict[str, Any] = {
        "dtype": "bfloat16",
        "link_gib_per_s": LINK_GIB_PER_S,
        "memory_gib": MEMORY_GIB,
        "max_model_len": MAX_MODEL_LEN,
        "scheduling_policy": "chameleon-paper",
        "growth_headroom": 0.0,
        "prefetch_requests": 0,
        "cpu_cores": "none",
        "load_strategy": "async_load",
    }
    # Prompts are computed so slowly there that copying their KV is always faster.
    profile = save_made_up_profile(
        with_demo(EngineConfig(device="cpu", **values)),
        tmp_path_factory.mktemp("profile") / "profile.json",
        Figures(step_s=Curve((1.0, 512.0), (0.002, 2.0)), link_bytes_per_s=LINK_GIB_PER_S * 2**30),
    )
    options = [
        text
        for name, value in (values | {"profile": profile, "log_slow_s": 1e-6}).items()
        for text in (f"--{name.replace('_', '-')}", str(value))
    ]
    # Preloaded, so that reading files is not among the longest parts in the log.
    with Served(*options, "--pin", "reverse", "--preload", "vowels") as served:
        yield served


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(16) as threads:
        yield threads


def prompt_of(seed: int, num_tokens: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(10, 90) for _ in range(num_tokens)]


def ask(
    server: Served, seed: int, num_tokens: int, max_tokens: int, *, model: str = BASE, predicted: int = 1
) -> tuple[str, Timing]:
    """Return the answer's id, and the timing of its only choice."""
    body = {
        "model": model,
        "prompt": prompt_of(seed, num_tokens),
        "max_tokens": max_tokens,
        "min_tokens": max_tokens,
        "ignore_eos": True,
        "predicted_output_tokens": predicted,
        "return_timing": True,
    }
    answer = server.post("/v1/completions", body)
    assert answer.status_code == 200, "\n".join([answer.text, *server.log_lines[-30:]])
    timing = answer.json()["timing"]
    (told,) = timing["engine"]
    assert sum(told["parts_s"].values()) == pytest.approx(told["time_to_first_token_s"])
    assert timing["outside_engine_s"] > 0.0
    assert told["output_tokens"] == max_tokens
    assert told["predicted_output_tokens"] == predicted
    return answer.json()["id"], told


def log_line(server: Served, request_id: str) -> str:
    """Return the log line of a request; all of them are slow enough for one."""
    wait_until(lambda: any(f"request {request_id} " in line for line in server.log_lines))
    (line,) = [line for line in server.log_lines if f"request {request_id} " in line]
    return line


def num_running(server: Served) -> float:
    return server.metrics()["corun:num_requests_running"]


def num_waiting(server: Served) -> float:
    return server.metrics()["corun:num_requests_waiting"]


def test_a_cold_request_says_so(server: Served) -> None:
    request_id, told = ask(server, 1, 20, 2, model="vowels")
    assert told["parts_s"]["adapter_load"] > 0.0, told
    line = log_line(server, request_id)
    assert f"for vowels had its first token after {told['time_to_first_token_s']:.3g} s: " in line
    # On a busy machine the load is not one of the two that took the most.
    for seconds in sorted(told["parts_s"].values())[-2:]:
        assert f" {seconds:.3g} s for " in line, told
    _, warm = ask(server, 2, 20, 2, model="vowels")
    assert "adapter_load" not in warm["parts_s"]


def test_a_request_whose_kv_comes_back_says_so(server: Served) -> None:
    for attempt in range(1, MAX_ROUNDS + 1):
        for number in (0, *range(1, 9), 0):  # the first one again, when others have pushed it out
            _, told = ask(server, 1000 * attempt + number, 200, 2)
        if told["prompt_tokens"]["host_cached"]:
            break
    assert told["prompt_tokens"]["host_cached"] >= 16, "it was never copied from the host"
    assert sum(told["prompt_tokens"].values()) == 200
    assert told["parts_s"]["kv_swap_in"] > 0.0, told


def test_a_preempted_request_says_so(server: Served, pool: ThreadPoolExecutor) -> None:
    asked = [pool.submit(ask, server, 100 + number, 20, 200) for number in range(8)]
    told = [one.result()[1] for one in asked]
    assert any(one["num_preemptions"] > one["num_squashes"] for one in told), told


def test_a_squashed_request_says_so(server: Served, pool: ThreadPoolExecutor) -> None:
    """A request that bypassed one without adapter memory, and exceeded its prediction."""
    for attempt in range(MAX_ROUNDS):  # until the three meet, on a machine of any speed
        seed = 10_000 + 10 * attempt
        long = [pool.submit(ask, server, seed + number, 450, 2) for number in range(4, 7)]
        assert all(one.result() for one in long), "so that no adapter is left but the pinned one"
        running: list[Future[tuple[str, Timing]]] = [
            pool.submit(ask, server, seed + number, 20, 450, model="upper", predicted=450)
            for number in range(2)
        ]
        wait_until(lambda: num_running(server) == 2)
        head = pool.submit(ask, server, seed + 2, 20, 2, model="add")
        wait_until(lambda: num_waiting(server) == 1)
        _, passing = ask(server, seed + 3, 10, 450)
        request_id, waited = head.result()
        assert all(one.result()[1]["num_squashes"] == 0 for one in running)
        if passing["num_squashes"]:
            break
    assert passing["num_squashes"] > 0, passing
    assert waited["parts_s"]["adapter_memory"] > 0.0
    held = r"for memory for its adapter, which \d running requests? held"
    assert re.search(held, log_line(server, request_id))


def test_metrics_have_the_sums(server: Served) -> None:
    before = server.metrics()
    _, told = ask(server, 400, 20, 3, model="upper")
    after = server.metrics()
    grown = {name: after[name] - before.get(name, 0.0) for name in after}
    in_parts_s = grown["corun:time_to_first_token_part_seconds_total"]
    assert in_parts_s == pytest.approx(told["time_to_first_token_s"])
    assert grown["corun:lora_time_to_first_token_seconds_count"] == 1
    assert grown["corun:lora_generation_tokens_total"] == 3

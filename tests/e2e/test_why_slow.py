"""Why was this request slow, and where is my adapter: a server says so, in answers and its log."""

import os
import re
from collections.abc import Iterator
from typing import Any

import pytest
from corun.profiles.curve import Curve
from corun.runtime.config.demo import with_demo
from corun.runtime.config.engine import EngineConfig
from support.model_profiles import Figures, save_made_up_profile
from support.serving import Served

LINK_GIB_PER_S = 0.05  # an adapter takes 15 ms
NUM_TOKENS = 200  # of a context
MAX_OUTSIDE_S = 5.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """With so little memory that history and running requests have to make way."""
    cpus = sorted(os.sched_getaffinity(0))
    values: dict[str, Any] = {
        "dtype": "bfloat16", "link_gib_per_s": LINK_GIB_PER_S, "load_strategy": "async_load",
        "engine_cores": str(cpus[0]), "cpu_cores": str(cpus[-1]), "memory_gib": 0.003,
        "block_size": 4, "max_model_len": NUM_TOKENS, "growth_headroom": 0, "log_slow_s": 0.001,
        "host_kv_bytes": "8MiB", "memory_policy": "lru",
    }  # fmt: skip
    profile = save_made_up_profile(
        with_demo(EngineConfig(device="cpu", **values)),
        tmp_path_factory.mktemp("profile") / "profile.json",
        # Whoever believes this brings KV back rather than computing it again.
        Figures(link_bytes_per_s=LINK_GIB_PER_S * 2**30, step_s=Curve((0.0, 10.0), (0.0, 10.0))),
    )
    options = [
        text
        for name, value in (values | {"profile": profile}).items()
        for text in (f"--{name.replace('_', '-')}", str(value))
    ]
    with Served(*options) as served:
        yield served


def timing(server: Served, **body: Any) -> dict[str, Any]:
    """Of the first choice, whose parts are held to what it says."""
    answer = server.post(
        "/v1/completions", {"model": "corun-demo", "return_timing": True, "temperature": 0} | body
    )
    assert answer.status_code == 200, answer.text
    told: dict[str, Any] = answer.json()["timing"]
    for one in told["engine"]:
        assert sum(one["parts_s"].values()) == pytest.approx(one["time_to_first_token_s"])
    inside_s = min(one["time_to_first_token_s"] for one in told["engine"])
    whole_s = inside_s + told["outside_engine_s"]
    assert whole_s == pytest.approx(told["time_to_first_token_s"])
    assert told["outside_engine_s"] < MAX_OUTSIDE_S
    return told


def test_a_cold_request_says_so(server: Served) -> None:
    before = server.get("/v1/lora_adapters/add").json()
    assert (before["level"], before["num_uses"]) == ("cpu", 0)
    told = timing(server, model="add", prompt="hello", max_tokens=4)
    (choice,) = told["engine"]
    assert choice["parts_s"]["adapter_load"] > 0.01
    assert (choice["prompt_tokens"]["computed"], choice["output_tokens"]) == (5, 4)
    after = server.get("/v1/lora_adapters/add").json()
    assert (after["level"], after["num_uses"]) == ("gpu", 1)
    assert after["loads"]["cpu_to_gpu"]["num_loads"] == 1
    line = next(one for one in server.log_lines if "for its adapter to be loaded" in one)
    assert re.search(r"request \d+: 0\.\d+ s: waited 0\.\d+ s for its adapter to be loaded", line)


def test_a_preempted_request_says_so(server: Served) -> None:
    """All are thought to end at once, and none does."""
    told = timing(
        server, prompt="hello", n=24, max_tokens=150, ignore_eos=True, temperature=1.0,
        predicted_output_tokens=1,
    )  # fmt: skip
    assert sum(one["num_preemptions"] for one in told["engine"]) > 0
    assert {one["predicted_output_tokens"] for one in told["engine"]} == {1}
    assert server.metrics('cause="kv_memory"')["corun:num_preemptions_total"] > 0


def test_a_request_whose_kv_was_on_the_host_says_so(server: Served) -> None:
    session = "a session that goes on when others have taken its memory. " * 2
    timing(server, prompt=session, max_tokens=4)
    for number in range(40):
        timing(server, prompt=f"{number} is somebody else, who has much to say as well. " * 2)
    (choice,) = timing(server, prompt=session + "go on", max_tokens=4)["engine"]
    assert choice["prompt_tokens"]["host_cached"] > 50
    assert choice["parts_s"]["kv_swap_in"] > 0
    assert server.metrics('kind="history_kv",level="cpu"')["corun:memory_bytes"] > 0
    assert server.metrics('direction="to_host",kind="kv"')["corun:link_bytes_total"] > 0


def test_what_all_waited_for_is_summed(server: Served) -> None:
    for part in ("adapter_load", "kv_swap_in", "compute", "order"):
        assert server.metrics(f'part="{part}"')["corun:time_to_first_token_part_seconds_total"] > 0

"""The content of ``/metrics``, from the engine and from answered requests."""

import re
from collections.abc import Callable
from typing import Any

import httpx
import msgspec
import pytest
from corun.runtime.engine.messages import CpuWorkerStats, EngineStats, LoadStats
from corun.runtime.engine_state import Residency
from prometheus_client.parser import text_string_to_metric_families
from support.fake_engine import make_adapter
from support.product import ROOT

Labels = tuple[tuple[str, str], ...]


def read_metrics(http: httpx.Client) -> dict[tuple[str, Labels], float]:
    """Return all samples by name and labels."""
    text = http.get("/metrics").text
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_gauges(http: httpx.Client) -> None:
    samples = read_metrics(http)
    model = ("model_name", "tiny")
    assert samples["corun:num_requests_waiting", (model,)] == 1
    assert samples["corun:num_requests_running", (model,)] == 2
    assert samples["corun:kv_cache_usage_perc", (model,)] == 0.25
    assert samples["corun:invalid_kv_bytes", (model,)] == 7
    assert samples["corun:memory_bytes", (("kind", "history_kv"), ("level", "device"), model)] == 8
    moved = (("direction", "to_device"), ("kind", "kv"), model)
    assert samples["corun:link_bytes_total", moved] == 11
    assert samples["corun:link_busy_seconds_total", moved] == 0.5
    for gauge, value in (("num_queues", 2), ("queue_1_quota_tokens", 5)):
        assert samples["corun:scheduling_policy", (("gauge", gauge), model)] == value
    cache = (("block_size", "16"), ("num_gpu_blocks", "100"))
    assert samples["corun:cache_config_info", cache] == 1
    device = (("link", "unpaced"), ("sync", "host"))
    assert samples["corun:device_info", device] == 1
    fallback = (("backend", "torch"), ("computes", "LoRA"), model)
    assert samples["corun:backend_info", fallback] == 1
    assert samples["corun:num_preemptions_total", (("cause", "kv_memory"), model)] == 3
    assert samples["corun:num_preemptions_total", (("cause", "squash"), model)] == 1
    waited = "corun:time_to_first_token_part_seconds_total"
    assert samples[waited, (model, ("part", "order"))] == 1.5
    assert samples[waited, (model, ("part", "kv_memory"))] == 2.5
    assert samples["corun:engine_alive", (model,)] == 1
    info = (("max_lora", "256"), ("running_lora_adapters", "upper"), ("waiting_lora_adapters", "digits"))
    assert samples["corun:lora_requests_info", info] > 1_700_000_000
    loaded = {labels for name, labels in samples if name == "corun:lora_adapter_loaded"}
    assert loaded == {
        (("adapter_name", "upper"), ("level", "device"), model, ("pinned", "false"), ("rank", "8")),
        (("adapter_name", "digits"), ("level", "host"), model, ("pinned", "false"), ("rank", "64")),
    }
    assert samples["corun:engine_state_age_seconds", (model,)] == 0.5


def test_counters(start_server: Callable[..., Any], engine: Any) -> None:
    server = start_server(type(engine)(), metrics_prefix="vllm")
    with httpx.Client(base_url=server.url, timeout=20) as http:
        body = {"prompt": ["hello", "you"], "max_tokens": 10, "n": 2}
        http.post("/v1/completions", json=body)
        http.post("/v1/completions", json=body | {"stream": True, "stop": "€"})
        http.post("/v1/completions", json={})
        http.get("/v1/models/upper")
        http.get("/random/path")
        http.request("PROPFIND", "/v1/models")
        samples = read_metrics(http)
    model = ("model_name", "tiny")
    assert samples["vllm:prompt_tokens_total", (model,)] == 16
    assert samples["vllm:generation_tokens_total", (model,)] == 80
    assert samples["vllm:request_success_total", (("finished_reason", "length"), model)] == 8
    for name in ("time_to_first_token", "e2e_request_latency"):
        assert samples[f"vllm:{name}_seconds_count", (model,)] == 4
    # Ten tokens each, the first three of them in the first output.
    assert samples["vllm:inter_token_latency_seconds_count", (model,)] == 4 * 7
    assert samples["vllm:inter_token_latency_seconds_bucket", (("le", "+Inf"), model)] == 28

    def num_http(method: str, handler: str, status: str) -> float:
        labels = (("handler", handler), ("method", method), ("status", status))
        return samples["vllm:http_requests_total", labels]

    assert num_http("POST", "/v1/completions", "200") == 2
    assert num_http("POST", "/v1/completions", "400") == 1
    assert num_http("GET", "/v1/models/{model}", "200") == 1
    assert num_http("GET", "other", "404") == 1
    assert num_http("other", "other", "405") == 1


def test_requests_are_counted_by_adapter(start_server: Callable[..., Any], engine: Any) -> None:
    server = start_server(type(engine)())
    odd, num_adapters = 'a "quoted\\one', 300
    names = [odd, *(f"a{number}" for number in range(num_adapters))]
    server.engine.adapters |= {name: make_adapter(name) for name in names}
    with httpx.Client(base_url=server.url, timeout=20) as http:
        for name in [*names, odd]:
            body = {"model": name, "prompt": "hello", "max_tokens": 4}
            assert http.post("/v1/completions", json=body).status_code == 200
        samples = read_metrics(http)
    model = ("model_name", "tiny")
    for name, per_request in (
        ("time_to_first_token_seconds_count", 1),
        ("prompt_tokens_total", 5),
        ("generation_tokens_total", 4),
    ):
        told = {
            dict(labels)["adapter_name"]: value
            for (sample, labels), value in samples.items()
            if sample == f"corun:lora_{name}" and model in labels
        }
        assert len(told) == 256 + 1
        assert (told[odd], told["a0"]) == (2 * per_request, per_request)
        assert told["other"] == (len(names) - 256) * per_request


def test_no_scrape_waits_for_the_engine(http: httpx.Client, engine: Any) -> None:
    async def wait(timeout_s: float) -> EngineStats:
        raise AssertionError("a scrape shows what was told last")

    engine.refresh_stats = wait
    for num_steps in (5, 6):
        engine.stats = EngineStats(num_steps=num_steps)
        samples = read_metrics(http)
        assert samples["corun:engine_steps_total", (("model_name", "tiny"),)] == num_steps


def test_adapter_series_are_capped(http: httpx.Client, engine: Any) -> None:
    template = engine.adapters["upper"]
    for index in range(300):
        name = f"a{index}"
        fields = {key: getattr(template, key) for key in template.__struct_fields__}
        residency = Residency(level="host" if index < 280 else "disk")
        engine.adapters[name] = type(template)(**fields | {"name": name, "residency": residency})
    samples = read_metrics(http)
    model = ("model_name", "tiny")
    loaded = [dict(labels) for name, labels in samples if name == "corun:lora_adapter_loaded"]
    named = [labels for labels in loaded if labels["adapter_name"] != "other"]
    assert len(named) == 256 and len(loaded) == 258
    assert {labels["adapter_name"]: labels["level"] for labels in named}["upper"] == "device"
    others = [
        samples["corun:lora_adapter_loaded", tuple(sorted(labels.items()))]
        for labels in loaded
        if labels["adapter_name"] == "other"
    ]
    assert sorted(others) == [20, 26], "on disk, and in host memory"
    for level, number in (("device", 1), ("partial", 0), ("host", 281), ("disk", 20)):
        assert samples[f"corun:num_{level}_loaded_lora_adapters", (model,)] == number


def test_names_of_adapters_are_escaped(http: httpx.Client, engine: Any) -> None:
    name = 'quo"te\\slash\n'
    engine.adapters[name] = make_adapter(name)
    assert any(("adapter_name", name) in labels for _, labels in read_metrics(http))


def test_cpu_workers_show_in_the_metrics(http: httpx.Client, engine: Any) -> None:
    engine.stats = EngineStats(cpu_workers=CpuWorkerStats(3, 0, num_restarts=4, num_failed_jobs=5))
    samples = read_metrics(http)
    model = (("model_name", "tiny"),)
    assert samples["corun:cpu_workers", model] == 3
    assert samples["corun:cpu_workers_ready", model] == 0
    assert samples["corun:cpu_worker_restarts_total", model] == 4
    assert samples["corun:cpu_worker_failed_jobs_total", model] == 5


def test_the_bound_of_gaps_beside_prompts_shows(http: httpx.Client, engine: Any) -> None:
    engine.stats = EngineStats(decode_gap_bound_s=0.35)
    name, model = "corun:decode_gap_bound_seconds", (("model_name", "tiny"),)
    assert read_metrics(http)[name, model] == 0.35


def test_seconds_without_progress_show(http: httpx.Client, engine: Any) -> None:
    name, model = "corun:engine_stalled_seconds", (("model_name", "tiny"),)
    assert read_metrics(http)[name, model] == 0
    engine.stall(12)
    assert read_metrics(http)[name, model] == 12


def test_a_directory_that_is_not_looked_at_shows(http: httpx.Client, engine: Any) -> None:
    name, model = "corun:lora_dir_unseen_seconds", (("model_name", "tiny"),)
    assert read_metrics(http)[name, model] == 0
    engine.stats = EngineStats(lora_dir_unseen_s=31)
    assert read_metrics(http)[name, model] == 31


def test_a_failed_profile_shows_in_the_metrics(http: httpx.Client, engine: Any) -> None:
    name, model = "corun:profile_failed", (("model_name", "tiny"),)
    assert read_metrics(http)[name, model] == 0
    info = msgspec.structs.replace(engine.get_model_info(), has_profile_failed=True)
    engine.get_model_info = lambda: info
    assert read_metrics(http)[name, model] == 1


def test_cold_starts_show_in_the_metrics(http: httpx.Client, engine: Any) -> None:
    engine.stats = EngineStats(cold_starts={"assisted": 3, "pipelined": 1}, num_retried_rows=2)
    samples = read_metrics(http)
    model = ("model_name", "tiny")
    name = "corun:adapter_cold_starts_total"
    assert samples[name, (model, ("strategy", "assisted"))] == 3
    assert samples[name, (model, ("strategy", "pipelined"))] == 1
    assert samples["corun:retried_rows_total", (model,)] == 2


def test_hits_of_prompts_show_in_the_metrics(http: httpx.Client, engine: Any) -> None:
    engine.stats = EngineStats(
        prompt_tokens_computed=30, prompt_tokens_cached=50, prompt_tokens_host_cached=20
    )
    samples = read_metrics(http)
    name, model = "corun:prompt_tokens_by_source_total", ("model_name", "tiny")
    assert samples[name, (model, ("source", "local_compute"))] == 30
    assert samples[name, (model, ("source", "local_cache_hit"))] == 50
    assert samples[name, (model, ("source", "external_kv_transfer"))] == 20
    assert samples["corun:external_prefix_cache_hits_total", (model,)] == 20
    assert samples["corun:prefix_cache_queries_total", (model,)] == 100
    assert samples["corun:prefix_cache_hits_total", (model,)] == 50
    assert samples["corun:prompt_tokens_cached_total", (model,)] == 70
    by_source = "corun:prompt_tokens_cached_by_source_total"
    assert samples[by_source, (model, ("source", "device"))] == 50
    assert samples[by_source, (model, ("source", "host"))] == 20


def test_evictions_show_in_the_metrics(http: httpx.Client, engine: Any) -> None:
    engine.stats = EngineStats(
        adapter_evictions={"device": {"kv": 3, "dropped": 1}, "host": {"adapter": 2}},
        adapter_loads={"host_to_device": LoadStats(4, 0.5)},
        num_loads_without_run=5,
        num_extents_evicted=6,
    )
    samples = read_metrics(http)
    name, model = "corun:lora_adapter_evictions_total", ("model_name", "tiny")
    assert samples[name, (("level", "device"), model, ("reason", "kv"))] == 3
    assert samples[name, (("level", "device"), model, ("reason", "dropped"))] == 1
    assert samples[name, (("level", "host"), model, ("reason", "adapter"))] == 2
    assert samples["corun:adapter_loads_without_run_total", (model,)] == 5
    assert samples["corun:memory_extents_evicted_total", (model,)] == 6
    name, labels = "corun:lora_adapter_load_seconds", (model, ("transition", "host_to_device"))
    assert (samples[f"{name}_count", labels], samples[f"{name}_sum", labels]) == (4, 0.5)


@pytest.mark.parametrize("accept", ["", "application/openmetrics-text; version=1.0.0", "*/*"])
def test_one_format_whose_names_have_their_colon(http: httpx.Client, accept: str) -> None:
    response = http.get("/metrics", headers={"Accept": accept})
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    names = {line.split("{")[0] for line in response.text.splitlines() if line[0] != "#"}
    assert all(name.startswith("corun:") for name in names)


def test_what_boards_of_vllm_read(start_server: Callable[..., Any], engine: Any) -> None:
    server = start_server(type(engine)(), metrics_prefix="vllm")
    with httpx.Client(base_url=server.url, timeout=20) as http:
        body = {"prompt": ["hello", "you"], "max_tokens": 10, "n": 2}
        assert http.post("/v1/completions", json=body).status_code == 200
        samples = read_metrics(http)
    model = (("model_name", "tiny"),)
    for name, number, total in (
        ("request_prompt_tokens", 2, 8),
        ("request_generation_tokens", 4, 40),
        ("request_max_num_generation_tokens", 2, 20),
    ):
        assert samples[f"vllm:{name}_count", model] == number
        assert samples[f"vllm:{name}_sum", model] == total
    for name in ("queue", "prefill", "decode", "inference"):
        assert samples[f"vllm:request_{name}_time_seconds_count", model] == 2
    parts = [samples[f"vllm:request_{name}_time_seconds_sum", model] for name in ("queue", "inference")]
    assert sum(parts) == pytest.approx(samples["vllm:e2e_request_latency_seconds_sum", model])
    assert samples["vllm:request_time_per_output_token_seconds_count", model] == 2
    assert samples["vllm:time_per_output_token_seconds_count", model] == 2 * 7
    assert samples["vllm:gpu_cache_usage_perc", model] == 0.25
    assert samples["vllm:max_gpu_lora_adapters", model] == 0  # no room was published
    assert samples["vllm:request_prefill_kv_computed_tokens_sum", model] == 8
    assert not any(name.startswith("corun") for name, _ in samples)


def test_what_inference_pickers_read(start_server: Callable[..., Any], engine: Any) -> None:
    """The names and labels that the inference extension of Kubernetes documents."""
    page = (ROOT / "runtime/cluster/KUBERNETES.md").read_text(encoding="utf-8")
    table = re.findall(r"`((?:num_req|kv_cache|cache_conf|lora_)\w*)(\{[^}]*\})?`", page)
    server = start_server(type(engine)(), metrics_prefix="vllm")
    with httpx.Client(base_url=server.url, timeout=20) as http:
        samples = read_metrics(http)
    shown = {name: {label for label, _ in labels} for name, labels in samples}
    assert len(table) >= 6
    for name, labels in table:
        assert set(labels.strip("{}").split(", ")) - {""} <= shown[f"vllm:{name}"], name


def test_what_those_of_its_server_process_read(start_server: Callable[..., Any], engine: Any) -> None:
    server = start_server(type(engine)(), metrics_prefix="vllm")
    with httpx.Client(base_url=server.url, timeout=20) as http:
        for body in ({"prompt": "hi"}, {"prompt": "hi"}, {}):
            http.post("/v1/completions", json=body)
        http.get("/health")
        samples = read_metrics(http)
    route = (("handler", "/v1/completions"), ("method", "POST"))
    for status, number in (("2xx", 2), ("4xx", 1)):
        assert samples["http_requests_total", (*route, ("status", status))] == number
    assert samples["http_request_duration_seconds_count", route] == 3
    assert samples["http_request_duration_seconds_sum", route] > 0
    assert not any(("handler", "/health") in labels for name, labels in samples if name[:4] == "http")
    for name in ("resident_memory_bytes", "cpu_seconds_total", "open_fds", "start_time_seconds"):
        assert samples[f"process_{name}", ()] > 0


def test_why_requests_wait_and_how_large_steps_are(http: httpx.Client, engine: Any) -> None:
    engine.stats = EngineStats(
        num_waiting=5, num_deferred=2, steps_by_tokens={1: 3, 64: 2}, num_step_tokens=103
    )
    samples = read_metrics(http)
    model = ("model_name", "tiny")
    waiting = "corun:num_requests_waiting_by_reason"
    assert samples[waiting, (model, ("reason", "capacity"))] == 3
    assert samples[waiting, (model, ("reason", "deferred"))] == 2
    steps = "corun:iteration_tokens_total"
    for bound, number in (("1.0", 3), ("32.0", 3), ("64.0", 5), ("+Inf", 5)):
        assert samples[f"{steps}_bucket", (("le", bound), model)] == number
    assert (samples[f"{steps}_count", (model,)], samples[f"{steps}_sum", (model,)]) == (5, 103)
    engine.stats = EngineStats(num_waiting=1, num_deferred=2)  # published a little later
    samples = read_metrics(http)
    assert samples[waiting, (model, ("reason", "capacity"))] == 0

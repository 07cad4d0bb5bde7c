"""What ``/metrics`` shows, from the engine and from the requests that were answered."""

from collections.abc import Callable
from typing import Any

import httpx
import msgspec
from corun.runtime.engine.messages import CpuWorkerStats, EngineStats
from prometheus_client.parser import text_string_to_metric_families

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
    assert samples["corun:memory_bytes", (("kind", "history_kv"), ("level", "gpu"), model)] == 8
    moved = (("direction", "to_device"), ("kind", "kv"), model)
    assert samples["corun:link_bytes_total", moved] == 11
    assert samples["corun:link_busy_seconds_total", moved] == 0.5
    assert samples["corun:scheduling_policy", (("gauge", "num_lanes"), model)] == 2
    lane = (("gauge", "quota_tokens"), ("lane", "1"), model)
    assert samples["corun:scheduling_lane", lane] == 5
    assert samples["corun:adapter_prefetches_total", (model, ("outcome", "hit"))] == 5
    assert samples["corun:adapter_prefetches_total", (model, ("outcome", "miss"))] == 0
    assert samples["corun:adapter_prefetch_wasted_bytes_total", (model,)] == 6
    cache = (("block_size", "16"), ("num_gpu_blocks", "100"))
    assert samples["corun:cache_config_info", cache] == 1
    device = (("link", "unpaced"), ("sync", "host"))
    assert samples["corun:device_info", device] == 1
    fallback = (("backend", "torch"), ("computes", "LoRA"), model)
    assert samples["corun:backend_info", fallback] == 1
    assert samples["corun:num_preemptions_total", (("cause", "kv_memory"), model)] == 3
    assert samples["corun:num_preemptions_total", (("cause", "squash"), model)] == 1
    assert samples["corun:engine_alive", (model,)] == 1
    info = (
        ("max_lora", "256"),
        ("running_lora_adapters", "upper"),
        ("waiting_lora_adapters", "digits"),
    )
    assert samples["corun:lora_requests_info", info] > 1_700_000_000
    loaded = {labels for name, labels in samples if name == "corun:lora_adapter_loaded"}
    assert loaded == {
        (("adapter_name", "upper"), ("level", "gpu"), ("pinned", "false"), ("rank", "8")),
        (("adapter_name", "digits"), ("level", "cpu"), ("pinned", "false"), ("rank", "64")),
    }


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


def test_every_scrape_asks_the_engine(http: httpx.Client, engine: Any) -> None:
    for engine.num_steps in (5, 6):
        samples = read_metrics(http)
        assert samples["corun:engine_steps_total", (("model_name", "tiny"),)] == engine.num_steps


def test_adapter_series_are_capped(http: httpx.Client, engine: Any) -> None:
    template = engine.adapters["upper"]
    for index in range(300):
        name = f"a{index}"
        fields = {key: getattr(template, key) for key in template.__struct_fields__}
        engine.adapters[name] = type(template)(**fields | {"name": name, "resident": False})
    samples = read_metrics(http)
    loaded = [labels for name, labels in samples if name == "corun:lora_adapter_loaded"]
    assert len(loaded) == 256
    assert any(("adapter_name", "upper") in labels for labels in loaded)
    assert samples["corun:num_cpu_loaded_lora_adapters", (("model_name", "tiny"),)] == 301


def test_cpu_workers_show_in_the_metrics(http: httpx.Client, engine: Any) -> None:
    engine.stats = EngineStats(cpu_workers=CpuWorkerStats(3, 0, num_restarts=4, num_failed_jobs=5))
    samples = read_metrics(http)
    model = (("model_name", "tiny"),)
    assert samples["corun:cpu_workers", model] == 3
    assert samples["corun:cpu_workers_ready", model] == 0
    assert samples["corun:cpu_worker_restarts_total", model] == 4
    assert samples["corun:cpu_worker_failed_jobs_total", model] == 5


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


def test_evictions_show_in_the_metrics(http: httpx.Client, engine: Any) -> None:
    engine.stats = EngineStats(num_device_evictions=3, num_host_evictions=2)
    samples = read_metrics(http)
    name, model = "corun:lora_adapter_evictions_total", ("model_name", "tiny")
    assert samples[name, (("level", "gpu"), model)] == 3
    assert samples[name, (("level", "cpu"), model)] == 2


def test_openmetrics_when_asked(http: httpx.Client) -> None:
    response = http.get("/metrics", headers={"Accept": "application/openmetrics-text"})
    assert response.headers["content-type"].startswith("application/openmetrics-text")
    assert response.text.endswith("# EOF\n")

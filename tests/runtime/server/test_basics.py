"""Models, adapters, metrics, version, tokens."""

from collections.abc import Callable
from typing import Any

import httpx
import msgspec
import pytest
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


def test_models(http: httpx.Client) -> None:
    body = http.get("/v1/models").json()
    assert body["object"] == "list"
    cards = {card["id"]: card for card in body["data"]}
    assert list(cards) == ["tiny", "alias", "upper", "digits"]  # the failed one is not offered
    assert cards["tiny"] == {
        "id": "tiny", "object": "model", "created": 1_700_000_000, "owned_by": "corun",
        "root": "demo/tiny", "parent": None, "max_model_len": 4096,
    }  # fmt: skip
    assert cards["upper"]["root"] == "/adapters/upper"
    assert cards["upper"]["parent"] == "tiny"
    for name in ("tiny", "alias", "upper", "tiny:upper"):
        card = http.get(f"/v1/models/{name}").json()
        assert card == cards[name.removeprefix("tiny:")]
    failed = http.get("/v1/models/broken")
    assert failed.status_code == 503
    assert "rank 512" in failed.json()["error"]["message"]


def test_model_names_with_slashes(http: httpx.Client, engine: Any) -> None:
    engine.adapters["team/upper"] = engine.adapters["upper"].__class__(
        "team/upper", "/x", "ready", None, 8, 1, "ab", True
    )
    assert http.get("/v1/models/team/upper").json()["id"] == "team/upper"


def test_adapter_list_tells_states(http: httpx.Client) -> None:
    data = http.get("/v1/lora_adapters").json()["data"]
    states = {adapter["name"]: (adapter["state"], adapter["reason"]) for adapter in data}
    assert states["upper"] == ("ready", None)
    assert states["broken"] == ("failed", "rank 512 is over the limit")


def test_served_name_defaults_to_the_models(start_server: Callable[..., Any], engine: Any) -> None:
    server = start_server(type(engine)(), served_names=())
    body = httpx.get(server.url + "/v1/models").json()
    assert body["data"][0]["id"] == "demo/tiny"


def test_version(http: httpx.Client) -> None:
    assert http.get("/version").json() == {"version": "1.2.3"}


def test_tokenize_and_back(http: httpx.Client) -> None:
    body = http.post("/tokenize", json={"prompt": "ab"}).json()
    assert body == {"count": 3, "max_model_len": 4096, "tokens": [1, 97, 98]}
    body = http.post("/tokenize", json={"messages": [{"role": "user", "content": "a"}]}).json()
    assert "".join(map(chr, body["tokens"])) == "<user>a<assistant>"
    assert http.post("/detokenize", json={"tokens": [97, 8364]}).json() == {"prompt": "a€"}
    for body in ({}, {"prompt": "a", "messages": []}):
        assert http.post("/tokenize", json=body).status_code == 400
    response = http.post("/detokenize", json={"tokens": [-1]})
    assert "-1" in response.json()["error"]["message"]


@pytest.mark.parametrize("prefix", ["", "/v1"])
def test_adapter_updates_are_off(http: httpx.Client, engine: Any, prefix: str) -> None:
    for verb in ("load", "unload"):
        body = {"lora_name": "new", "lora_path": "/x"}
        response = http.post(f"{prefix}/{verb}_lora_adapter", json=body)
        assert response.status_code == 403
        error = response.json()["error"]
        assert error["type"] == "permission_error"
        assert "CORUN_ALLOW_RUNTIME_LORA_UPDATING=1" in error["message"]
    assert "new" not in engine.adapters


def test_adapter_updates(start_server: Callable[..., Any], engine: Any) -> None:
    engine = type(engine)()
    server = start_server(engine, allow_lora_updates=True)
    with httpx.Client(base_url=server.url, timeout=20) as http:

        def post(path: str, **body: Any) -> httpx.Response:
            return http.post(path, json=body)

        done = post("/v1/load_lora_adapter", lora_name="new", lora_path="/x")
        assert done.status_code == 200
        assert done.json()["adapter"]["path"] == "/x"
        body = {"prompt": "hi", "model": "new"}
        assert http.post("/v1/completions", json=body).status_code == 200
        taken = post("/load_lora_adapter", lora_name="new", lora_path="/y")
        assert taken.status_code == 400
        assert "load_inplace" in taken.json()["error"]["message"]
        again = post("/load_lora_adapter", lora_name="new", lora_path="/y", load_inplace=True)
        assert again.json()["adapter"]["path"] == "/y"
        bad = post("/v1/load_lora_adapter", lora_name="bad", lora_path="/missing")
        assert bad.status_code == 400
        assert bad.json()["error"]["code"] == "adapter_refused"
        assert "/missing" in bad.json()["error"]["message"]
        for name in ("", "tiny", "a\nb", "x" * 300):
            refused = post("/v1/load_lora_adapter", lora_name=name, lora_path="/x")
            assert refused.json()["error"]["param"] == "lora_name"
        pinned = post("/v1/load_lora_adapter", lora_name="p", lora_path="/x", pinned=True)
        assert pinned.json()["error"]["code"] == "not_served"
        assert post("/v1/unload_lora_adapter", lora_name="new").status_code == 200
        gone = post("/unload_lora_adapter", lora_name="uper")
        assert gone.status_code == 404
        assert "'upper'" in gone.json()["error"]["message"]
        assert "new" not in [card["id"] for card in http.get("/v1/models").json()["data"]]


def test_gauges(http: httpx.Client) -> None:
    samples = read_metrics(http)
    model = ("model_name", "tiny")
    assert samples["corun:num_requests_waiting", (model,)] == 1
    assert samples["corun:num_requests_running", (model,)] == 2
    assert samples["corun:kv_cache_usage_perc", (model,)] == 0.25
    cache = (("block_size", "16"), ("num_gpu_blocks", "100"))
    assert samples["corun:cache_config_info", cache] == 1
    device = (("link", "unpaced"), ("sync", "host"))
    assert samples["corun:device_info", device] == 1
    fallback = (("backend", "torch"), ("computes", "LoRA"), model)
    assert samples["corun:backend_info", fallback] == 1
    assert samples["corun:num_preemptions_total", (model,)] == 3
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

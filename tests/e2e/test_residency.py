"""The level of each adapter in HTTP, metrics and log, which agree."""

import json
import os
import shutil
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from corun.runtime.config.engine import EngineConfig
from corun.runtime.demo import demo_adapters_path, demo_model_path
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample
from support.gated_server import GatedServer
from support.model_profiles import save_made_up_profile
from support.serving import ANSWER_TIMEOUT_S, wait_until

LISTING = "/v1/lora_adapters"
LEVELS = ("device", "partial", "host", "disk")
LOADED = ("ready", "draining")
# Bytes of one adapter (all are equal), with room for this many beside a little KV.
DEVICE_BYTES, HOST_BYTES = 507_840, 512_000
NUM_ON_DEVICE, NUM_ON_HOST = 2, 3
NUM_GROUPS = 5
TENSORS_OF_A_LAYER = 14
MAX_MODEL_LEN = 64
MAX_ANSWER_S = 10.0  # of routes about the engine, while it is stopped


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[GatedServer, httpx.Client]]:
    """Adapters are copied to the device, which has room for two; the host has room for three."""
    values: dict[str, Any] = {
        "device": "cpu",
        "dtype": "bfloat16",
        "link_gib_per_s": 50.0,
        "load_strategy": "async_load",
        "engine_cores": str(min(os.sched_getaffinity(0))),
        "cpu_cores": "none",
        "max_model_len": MAX_MODEL_LEN,
        "prefix_cache": "off",
        "memory_policy": "lru",
        "prefetch_requests": 0,
        "memory_gib": (NUM_ON_DEVICE + 0.5) * DEVICE_BYTES / 2**30,
        "host_bytes": str(int((NUM_ON_HOST + 0.5) * HOST_BYTES)),
    }
    folder = tmp_path_factory.mktemp("gated")
    model = str(demo_model_path())
    profile = save_made_up_profile(EngineConfig(model=model, **values), folder / "profile.json")
    options = [
        text
        for name, value in (values | {"profile": profile}).items()
        for text in (f"--{name.replace('_', '-')}", str(value))
    ]
    with (
        GatedServer(folder / "gates", model, "--log-level", "debug", *options) as served,
        served.client() as http,
    ):
        yield served, http


class Background:
    """A task that runs meanwhile and must finish."""

    def __init__(self, work: Callable[[], object]) -> None:
        self._results: list[object] = []
        self._thread = threading.Thread(target=lambda: self._results.append(work()))
        self._thread.start()

    def join(self) -> Any:
        self._thread.join(ANSWER_TIMEOUT_S)
        (result,) = self._results
        return result


class Operator:
    """Asks a server over HTTP, and reads its log."""

    def __init__(self, server: GatedServer, http: httpx.Client, folder: Path) -> None:
        """``folder``: for adapters."""
        self.server = server
        self.http = http
        self._folder = folder
        self._num_before = len(server.log_lines)

    def load(self, name: str, variant: int | None = None, **options: Any) -> httpx.Response:
        """Register a variant of one adapter, a new one by default; sizes are the same."""
        number = len([*self._folder.iterdir()]) if variant is None else variant
        path = self._folder / str(number)
        if not path.exists():
            shutil.copytree(demo_adapters_path() / "reverse", path)
            config = json.loads((path / "adapter_config.json").read_text())
            config["lora_alpha"] += number
            (path / "adapter_config.json").write_text(json.dumps(config))
        body = {"lora_name": name, "lora_path": str(path), **options}
        return self.http.post("/v1/load_lora_adapter", json=body)

    def unload(self, name: str) -> None:
        answer = self.http.post("/v1/unload_lora_adapter", json={"lora_name": name})
        assert answer.status_code == 200, answer.text

    def ask(self, model: str, max_tokens: int = 2) -> None:
        body = {"model": model, "prompt": "hello", "max_tokens": max_tokens, "ignore_eos": True}
        answer = self.http.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text

    def get(self, name: str) -> dict[str, Any]:
        """Return all fields of one adapter."""
        answer = self.http.get(f"{LISTING}/{name}")
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def listed(self, **query: str) -> dict[str, dict[str, Any]]:
        page = self.http.get(LISTING, params=query).json()
        return {one["name"]: one for one in page["data"]}

    def metrics(self) -> dict[str, list[Sample]]:
        families = text_string_to_metric_families(self.http.get("/metrics").text)
        return {one.name.removeprefix("corun:"): one.samples for one in families}

    def logged(self, name: str) -> str:
        """Return an adapter's last state in the log."""
        lines = self.server.log_lines[self._num_before :]
        places = [one.rpartition(" -> ")[2] for one in lines if f": adapter '{name}': " in one]
        return places[-1] if places else ""

    def check(self, name: str, state: str, level: str, **wanted: Any) -> dict[str, Any]:
        """Wait for this state, check that all sources agree, and return that of HTTP."""
        wanted |= {"state": state, "level": level, "resident": level == "device"}
        wait_until(lambda: self._is_told(name, wanted))
        told = self.listed()
        one = self.get(name)
        assert one.pop("age_s") >= 0 and one == told[name]
        self._check_metrics(told)
        for wanted_level in LEVELS:
            there = {name for name, one in told.items() if one["level"] == wanted_level}
            assert self.listed(level=wanted_level).keys() == there
        place = f"{state}, {level}" if state in LOADED else state
        if level == "partial":
            place += f" {one['num_groups_loaded']}/{one['num_groups']}"
        wait_until(lambda: self.logged(name) == place)
        return one

    def _is_told(self, name: str, wanted: dict[str, Any]) -> bool:
        told = self.listed().get(name, {})
        return {key: told.get(key) for key in wanted} == wanted

    def _check_metrics(self, told: dict[str, dict[str, Any]]) -> None:
        """Check that the metrics agree with HTTP."""
        levels = {name: one["level"] for name, one in told.items() if one["state"] in LOADED}
        metrics = self.metrics()
        series = [sample.labels for sample in metrics["lora_adapter_loaded"]]
        assert {one["adapter_name"]: one["level"] for one in series} == levels
        counts = Counter(levels.values())
        for level in LEVELS:
            (count,) = metrics[f"num_{level}_loaded_lora_adapters"]
            assert count.value == counts[level]


@pytest.fixture
def operator(running: tuple[GatedServer, httpx.Client], tmp_path: Path) -> Iterator[Operator]:
    """The operator of a server without adapters and with open gates."""
    operator = Operator(*running, tmp_path)
    yield operator
    operator.server.files.open()
    operator.server.link.open()
    for name, told in operator.listed().items():
        if told["state"] != "draining":
            operator.unload(name)
    wait_until(lambda: not operator.listed())


def test_an_adapter_walks_through_all_levels(operator: Operator) -> None:
    operator.server.files.close()
    loading = Background(lambda: operator.load("walker"))
    operator.check("walker", "loading", "disk")
    operator.server.files.open()
    assert loading.join().status_code == 200
    operator.check(
        "walker", "ready", "host", device_bytes=0, host_bytes=HOST_BYTES, num_groups=0, num_uses=0, loads={}
    )

    operator.server.link.close()
    asked = Background(lambda: operator.ask("walker"))
    operator.check("walker", "ready", "host", num_waiting=1, num_groups=NUM_GROUPS)
    operator.server.link.let(2)
    told = operator.check("walker", "ready", "partial", num_groups_loaded=2, num_waiting=1)
    assert (told["device_bytes"], told["host_bytes"]) == (DEVICE_BYTES, HOST_BYTES)
    operator.server.link.open()
    asked.join()
    told = operator.check("walker", "ready", "device", num_uses=1, num_waiting=0, num_references=0)
    assert told["loads"]["host_to_device"]["num_loads"] == 1 and "disk_to_host" not in told["loads"]
    assert told["evictions"] == {}

    for name in ("second", "third"):
        assert operator.load(name).status_code == 200
        operator.ask(name)
    evictions = {"device": {"adapter": 1}}
    operator.check("walker", "ready", "host", device_bytes=0, evictions=evictions)
    assert operator.load("fourth").status_code == 200
    evictions |= {"host": {"adapter": 1}}
    operator.check("walker", "ready", "disk", host_bytes=0, evictions=evictions)

    operator.server.files.close()
    asked = Background(lambda: operator.ask("walker"))
    operator.check("walker", "ready", "disk", num_waiting=1, num_groups=NUM_GROUPS)
    operator.server.files.let(3 * TENSORS_OF_A_LAYER)
    operator.check("walker", "ready", "partial", num_groups_loaded=3, host_bytes=0)
    operator.server.files.open()
    asked.join()
    told = operator.check("walker", "ready", "device", host_bytes=HOST_BYTES, num_uses=2)
    loads = {transition: one["num_loads"] for transition, one in told["loads"].items()}
    assert loads == {"host_to_device": 2, "disk_to_host": 1}


def test_a_pinned_one_stays_under_pressure(operator: Operator) -> None:
    assert operator.load("pinned", pinned=True).status_code == 200
    operator.check("pinned", "ready", "device", pinned=True, num_uses=0)
    others = ("second", "third", "fourth")
    for name in others:
        assert operator.load(name).status_code == 200
    for name in others * 2:  # each replaces the previous one
        operator.ask(name)
        operator.check(name, "ready", "device")
        assert "device" not in operator.check("pinned", "ready", "device")["evictions"]
    base = [Background(lambda: operator.ask(demo_model_path().name, 56)) for _ in range(16)]
    for request in base:
        assert "device" not in operator.check("pinned", "ready", "device")["evictions"]
        request.join()
    assert operator.get("fourth")["evictions"]["device"]["kv"], "KV did not need its room"
    series = [one.labels for one in operator.metrics()["lora_adapter_loaded"]]
    there = [(one["adapter_name"], one["pinned"]) for one in series if one["level"] == "device"]
    assert there == [("pinned", "true")]


def test_versions_come_and_go_while_it_is_told(operator: Operator, tmp_path: Path) -> None:
    assert operator.load("one", 1).status_code == 200
    old = operator.get("one")["version"]
    operator.server.link.close()
    asked = [Background(lambda: operator.ask("one"))]
    operator.check("one", "ready", "host", num_waiting=1)
    assert operator.load("one", 2, load_inplace=True).status_code == 200
    told = operator.check("one", "ready", "host", num_waiting=0)
    (draining,) = told["draining"]
    assert (draining["version"], draining["num_waiting"], draining["level"]) == (old, 1, "host")
    assert told["version"] != old

    asked.append(Background(lambda: operator.ask("one")))
    operator.check("one", "ready", "host", num_waiting=1)
    operator.unload("one")
    told = operator.check("one", "draining", "host", num_waiting=1)
    assert [one["version"] for one in told["draining"]] == [old]
    operator.server.link.open()
    for request in asked:
        request.join()
    wait_until(lambda: not operator.listed())
    wait_until(lambda: operator.logged("one") == "not registered")
    assert operator.http.get(f"{LISTING}/one").status_code == 404

    (tmp_path / "3").mkdir()
    assert operator.load("broken", 3).status_code == 400
    told = operator.check("broken", "failed", "disk")
    assert "adapter_config.json" in told["reason"]


def test_an_engine_that_computes_keeps_nobody_waiting(operator: Operator) -> None:
    """During a long step the engine's process does nothing else."""
    assert operator.load("there").status_code == 200
    operator.ask("there")
    operator.check("there", "ready", "device")
    os.kill(operator.server.engine.pid, signal.SIGSTOP)
    try:
        ages_s: list[float] = []
        with operator.server.client(MAX_ANSWER_S) as client:
            for _ in range(2):
                page = client.get(LISTING).json()
                assert [one["level"] for one in page["data"]] == ["device"]
                one = client.get(f"{LISTING}/there").json()
                ages_s += [page["age_s"], one["age_s"]]
                assert 'adapter_name="there",level="device"' in client.get("/metrics").text
        (age,) = operator.metrics()["engine_state_age_seconds"]
        ages_s.append(age.value)
        assert ages_s == sorted(set(ages_s)) and ages_s[0] > 0, "they are older each time"
    finally:
        os.kill(operator.server.engine.pid, signal.SIGCONT)
    wait_until(lambda: operator.get("there")["age_s"] < ages_s[-1])

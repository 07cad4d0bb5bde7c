"""First uses of adapters over HTTP: nothing has read their values before the request."""

import itertools
import random
import shutil
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
from corun.runtime.config.engine import EngineConfig
from models import save_model
from serve import corun_server

from cold.rig import engine_and_worker_cpus, make_config, with_measured_profile
from cold.workload import SIZES, adapter_name, make_adapters

_RANKS = (8, 12, 16, 24, 32, 48, 64, 80, 96, 128)
_NUM_WARM = 3
_WARM_UP = "warm-up"
_LINK_GIB_PER_S = 0.03
_MAX_MEDIAN, _MAX_WORST = 1.25, 1.6
_PROFILE_S = 30.0
_TIMEOUT_S = 60.0


def measure(directory: Path, options: Any) -> tuple[dict[str, Any], dict[str, bool | None]]:
    """Return the first tokens of first uses over those of warm requests, and the bounds."""
    size = SIZES[options.size]
    save_model(size, directory / "model")
    originals, folder = directory / "made", directory / "adapters"
    make_adapters(originals, size, [(rank, "all") for rank in _RANKS])
    shutil.copytree(originals / adapter_name(_RANKS[0], "all"), folder / _WARM_UP)
    names: list[str] = []
    for copy, rank in itertools.product(range(options.pairs), _RANKS):
        names.append(f"{adapter_name(rank, 'all')}-{copy}")
        shutil.copytree(originals / adapter_name(rank, "all"), folder / names[-1])
    config = make_config(directory / "model", folder, options.profile, engine_and_worker_cpus())
    config = replace(config, link_gib_per_s=_LINK_GIB_PER_S)
    if options.profile is None:
        path = options.keep_profile or directory / "profile.json"
        config = with_measured_profile(config, path, _PROFILE_S, print)
    with corun_server(directory / "model", folder, *_flags(config), preloaded=()) as (host, port, _):
        client = _Client(f"http://{host}:{port}", options.prompt_tokens, size.vocab_size)
        client.use(_WARM_UP)  # makes what the first request of all makes
        uses = [client.use(name) for name in names]
    ratios = [use["first_ms"] / use["warm_ms"] for use in uses]
    # By adapter over its copies: the first ones also pay what a shape costs once.
    by_rank = [statistics.median(ratios[rank :: len(_RANKS)]) for rank in range(len(_RANKS))]
    median, worst = statistics.median(by_rank), max(by_rank)
    figures = {"median": median, "worst": worst, "by_rank": dict(zip(_RANKS, by_rank, strict=True))}
    bounds: dict[str, bool | None] = {
        f"median at most {_MAX_MEDIAN}": median <= _MAX_MEDIAN,
        f"worst at most {_MAX_WORST}": worst <= _MAX_WORST,
    }
    return figures | {"uses": uses}, bounds


class _Client:
    def __init__(self, url: str, prompt_tokens: int, vocab: int) -> None:
        self._http = httpx.Client(base_url=url, timeout=_TIMEOUT_S)
        self._prompt_tokens, self._vocab = prompt_tokens, vocab
        self._rng = random.Random(0)

    def use(self, name: str) -> dict[str, Any]:
        """Use an adapter first, and then warm."""
        parts: dict[str, float] = {}
        first_s = self.first_s(name, parts)
        deadline_s = time.monotonic() + _TIMEOUT_S
        while self._http.get(f"/v1/lora_adapters/{name}").json()["level"] != "device":
            assert time.monotonic() < deadline_s, f"{name} is not loaded in time"
            time.sleep(0.01)
        warm_s = statistics.median(self.first_s(name, {}) for _ in range(_NUM_WARM))
        parts_ms = {part: round(seconds * 1e3, 1) for part, seconds in parts.items()}
        return {"first_ms": round(first_s * 1e3, 1), "warm_ms": round(warm_s * 1e3, 1), "parts_ms": parts_ms}

    def first_s(self, name: str, parts: dict[str, float]) -> float:
        """Return the time of a request of one token; adds how it was spent in the engine."""
        prompt = [self._rng.randrange(3, self._vocab) for _ in range(self._prompt_tokens)]
        body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, "ignore_eos": True}
        begin_s = time.perf_counter()
        answer = self._http.post("/v1/completions", json=body | {"return_timing": True, "model": name})
        first_s = time.perf_counter() - begin_s
        answer.raise_for_status()
        parts |= answer.json()["timing"]["engine"][0]["parts_s"]
        return first_s


def _flags(config: EngineConfig) -> Sequence[str]:
    names = (
        "dtype",
        "engine_cores",
        "cpu_cores",
        "link_gib_per_s",
        "max_num_seqs",
        "memory_gib",
        "profile",
        "linear_backend",
        "attention_backend",
        "lora_backend",
    )
    return [text for name in names for text in (f"--{name.replace('_', '-')}", str(getattr(config, name)))]

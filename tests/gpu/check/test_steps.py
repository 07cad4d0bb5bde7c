"""Questions about steps and cold starts: their control flow on the CPU, and what they make of figures."""

import math
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from corun.gpu.check import cold, steps
from corun.gpu.check.cold import ColdSizes
from corun.gpu.check.engine import StepEngine
from corun.gpu.check.questions import Findings
from corun.runtime.coldstart.strategy import LoadStrategy
from corun.runtime.engine.tokenizer import load_tokenizer
from corun.runtime.plan import SubBatch
from support.cold_engine import ColdEngine

_CPU, _CUDA = SimpleNamespace(name="CPU"), SimpleNamespace(name="CUDA")


def _event(key: str, count: int, device: object, time_us: float) -> SimpleNamespace:
    return SimpleNamespace(key=key, count=count, device_type=device, self_device_time_total=time_us)


def test_kernels_copies_and_calls_are_told_apart() -> None:
    events = [
        _event("aten::mm", 7, _CPU, 0.0),
        _event("cudaLaunchKernel", 9, _CPU, 0.0),
        _event("cuLaunchKernelEx", 2, _CPU, 0.0),
        _event("ampere_gemm", 7, _CUDA, 800.0),
        _event("shrink_kernel", 4, _CUDA, 150.0),
        _event("Memcpy HtoD (Pinned -> Device)", 1, _CUDA, 40.0),
        _event("Memset (Device)", 1, _CUDA, 10.0),
    ]
    assert steps.work_of(events) == {
        "kernels": 11,
        "copies": 2,
        "device_ms": 1.0,
        "calls": {"cudaLaunchKernel": 9, "cuLaunchKernelEx": 2},
        "most": {"ampere_gemm": 7, "shrink_kernel": 4},
    }


def test_every_step_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "_NUM_STEPS", 3)
    passes = []
    ask = StepEngine.submit

    def counted(engine: StepEngine, *batches: SubBatch, **fields: Any) -> None:
        passes.append([sum(batch.num_tokens) for batch in batches])
        ask(engine, *batches, **fields)

    monkeypatch.setattr(StepEngine, "submit", counted)
    found = Findings(tmp_path / "figures")
    steps.answer("steps", "cpu", 600.0, found)
    measured = {
        name: value for name, value in found.values.items() if isinstance(value, dict) and "ms" in value
    }
    assert measured.keys() >= {
        *steps.COUNTED,
        "temperature",
        "17 rows of one adapter",
        "first use of 23 rows",
    }
    assert all(value["ms"] > 0 < value["first_ms"] for value in measured.values())
    assert measured["adapters"]["counted"] == 15 + 17 + 7 and "counted" not in measured["temperature"]
    assert found.values["layers"] == 1 and found.values["parity_error"] < 0.05
    assert found.values["16 rows and a chunk of 512"].keys() == {"together", "apart"}
    assert [passes.count([16 + 40]), passes.count([16, 40])] == [3, 3]


def test_attention_is_compared_with_that_of_torch(tmp_path: Path) -> None:
    found = Findings(tmp_path / "figures")
    steps.answer("attention", "cpu", 600.0, found)
    assert found.values["prompt of 2048"].keys() == {"corun", "torch"}
    assert found.values["decode, 1 row of 32768 and 31 of 512"]["corun"]["ms"] > 0


def test_kernels_that_are_wrong_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = Findings(tmp_path / "figures")
    steps.answer("kernels", "cpu", 600.0, found)
    right = found.values["bfloat16 attention"]
    assert all(right[f"heads of {dim}"] <= right["limit"] for dim in (64, 128, 256))
    monkeypatch.setattr(steps, "max_probe_error", lambda *_: math.nan)
    with pytest.raises(RuntimeError, match="bfloat16 attention, heads of 256: nan"):
        steps.answer("kernels", "cpu", 600.0, found)


@pytest.fixture(scope="module")
def sizes() -> ColdSizes:
    return replace(cold.TINY, prompts=(8,), running_tokens=12)


@pytest.fixture(scope="module")
def engine(sizes: ColdSizes, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ColdEngine]:
    folder = tmp_path_factory.mktemp("cold")
    cold.save_random(sizes.config, sizes.ranks, folder, "cpu")
    adapters = {path.name: path for path in (folder / "adapters").iterdir()}
    made = ColdEngine(
        folder / "model", adapters, folder, link_gib_per_s=0.5, memory_gib=0.05, delta_backend="numba"
    )
    yield made
    made.close()


def test_every_token_of_a_random_model_has_text(sizes: ColdSizes, tmp_path: Path) -> None:
    cold.save_random(sizes.config | {"vocab_size": 300}, (), tmp_path, "cpu")
    tokenizer = load_tokenizer(str(tmp_path / "model"))
    assert len({tokenizer.decode([number]) for number in range(300)} - {""}) == 300


def test_cold_requests_start_by_every_strategy(engine: ColdEngine, sizes: ColdSizes, tmp_path: Path) -> None:
    found = Findings(tmp_path / "figures")
    cold.measure(engine.assembly, sizes, found, time.monotonic() + 600)
    first = found.values["first token, rank 4, prompt of 8, ms"]
    cold_ones = ["async_load", "pipelined", "assisted"]
    assert list(first) == ["on the device", *cold_ones] and all(value > 0 for value in first.values())
    for name in cold_ones:
        gaps = found.values[f"gaps beside a load, {name}, ms"]
        assert gaps["median"] > 0 and gaps["max"] > 0
    assert found.values["profile"]["model"]["num_layers"] == 2
    loads = [plan for plan in engine.plans if plan.transfers]
    assert len(loads) >= len(LoadStrategy) - 1, "each cold start loads the adapter"

"""What an engine takes from its process it gives back, also when it cannot start."""

import gc
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from corun import Engine, SamplingParams
from corun.gpu.device.cpu import CpuDevice
from corun.runtime.engine import build
from corun.runtime.errors import ConfigError
from support.architectures import save_model
from support.fake_engine import save_tokenizer
from transformers import AttentionInterface


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory = save_model("llama3-rope", tmp_path_factory.mktemp("model"))
    save_tokenizer(directory)
    return {
        "model": str(directory), "device": "cpu", "dtype": "float32", "memory_gib": 0.01,
        "linear_backend": "plain", "attention_backend": "torch", "lora_backend": "torch",
    }  # fmt: skip


def held() -> tuple[int, list[str], list[str]]:
    """Open descriptors, threads of corun, attention functions of corun."""
    gc.collect()
    threads = [t.name for t in threading.enumerate() if t.name.startswith("corun")]
    functions = [name for name in AttentionInterface._global_mapping if name.startswith("corun")]
    return len(os.listdir("/proc/self/fd")), threads, functions


def answer(options: dict[str, Any]) -> list[int]:
    with Engine(**options) as engine:
        (output,) = engine.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=4))
        return output.outputs[0].token_ids


def test_engines_that_are_closed_leave_nothing(options: dict[str, Any]) -> None:
    first = answer(options)
    before = held()
    assert before[1:] == ([], [])
    for _ in range(4):
        assert answer(options) == first
        assert held() == before


@pytest.mark.parametrize("step", ["_plan_memory", "_make_scheduler", "_model_info"])
def test_a_failed_start_leaves_nothing(
    options: dict[str, Any], step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer(options)
    before = held()

    def fail(*arguments: Any) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(build, step, fail)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            Engine(**options)
    assert held() == before


def test_an_adapter_that_was_named_must_be_servable(
    options: dict[str, Any], tmp_path: Path
) -> None:
    before = held()
    with pytest.raises(Exception, match="adapter 'x'"):
        Engine(**options, lora_modules=(f"x={tmp_path}",))
    assert held() == before


def test_an_engine_owns_a_device_and_closes_it(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[CpuDevice] = []
    close = CpuDevice.close

    def note(device: CpuDevice, **timeout: float) -> None:
        closed.append(device)
        close(device, **timeout)

    monkeypatch.setattr(CpuDevice, "close", note)
    with Engine(**options, link_gib_per_s=2, link_latency_us=5) as engine:
        choices = engine.get_model_info().device_choices
        assert closed == []
    assert choices == {
        "registration": "none", "signal": "host", "wait": "host", "link": "2 GiB/s + 5 us",
    }  # fmt: skip
    assert len(set(map(id, closed))) == 1
    with pytest.raises(ConfigError, match="--device-wait stream-op needs a CUDA device"):
        Engine(**options, device_wait="stream-op")

"""What an engine takes from its process it gives back, also when it cannot start."""

import gc
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from corun import Engine, LoRARequest, SamplingParams
from corun.gpu import assemble
from corun.gpu.device.cpu import CpuDevice
from corun.runtime.config.engine import EngineConfig
from corun.runtime.engine import build
from corun.runtime.errors import ConfigError
from support.architectures import save_model
from support.fake_engine import save_tokenizer
from support.half_made_segment import half_made_segment
from support.model_profiles import save_made_up_profile
from support.peft_adapters import save_adapter
from support.residue import named_segments
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


def test_a_start_removes_what_the_dead_left_and_nothing_of_the_living(
    options: dict[str, Any],
) -> None:
    with half_made_segment() as left, half_made_segment() as living:
        assert {left.name, living.name} <= set(os.listdir("/dev/shm"))
        left.creator.kill()
        left.creator.wait()
        answer(options)
        names = os.listdir("/dev/shm")
        assert left.name not in names
        assert living.name in names


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


def test_a_tokenizer_with_code_of_its_own_is_not_told(options: dict[str, Any]) -> None:
    plain, remote = EngineConfig(**options), EngineConfig(**options, trust_remote_code=True)
    assert build._tokenizer_spec(plain, lambda _: None) is not None
    assert build._tokenizer_spec(remote, lambda _: None) is None


def profile_of(options: dict[str, Any], directory: Path) -> str:
    """Or each engine with a link would measure one."""
    return str(save_made_up_profile(EngineConfig(**options), directory / "profile.json"))


def test_kernels_are_warmed_before_an_engine_is_ready(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths: list[int] = []

    def note(loaded: object, runner: object, max_model_len: int, on_progress: object) -> None:
        lengths.append(max_model_len)

    monkeypatch.setattr(assemble, "warm_up_kernels", note)
    with Engine(**options) as engine:
        assert lengths == [engine.get_model_info().max_model_len]


def test_an_engine_owns_a_device_and_closes_it(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    paced = {**options, "link_gib_per_s": 2, "link_latency_us": 5}
    profile = profile_of(paced, tmp_path)
    closed: list[CpuDevice] = []
    close = CpuDevice.close

    def note(device: CpuDevice, **timeout: float) -> None:
        closed.append(device)
        close(device, **timeout)

    monkeypatch.setattr(CpuDevice, "close", note)
    with Engine(**paced, profile=profile) as engine:
        choices = engine.get_model_info().device_choices
        backends = engine.get_model_info().backends
        assert closed == []
    assert backends.keys() >= {"attention", "LoRA", "linear"}
    assert choices == {
        "registration": "none", "signal": "host", "wait": "host", "link": "2 GiB/s + 5 us",
    }  # fmt: skip
    assert len(set(map(id, closed))) == 1
    with pytest.raises(ConfigError, match="--device-wait stream-op needs a CUDA device"):
        Engine(**options, device_wait="stream-op")


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate("abc"):
        save_adapter(directory / name, seed=seed, target_modules="all-linear", lora_alpha=64)
    return {name: directory / name for name in "abc"}


def adapted_answers(options: dict[str, Any], adapters: dict[str, Path]) -> list[list[int]]:
    """Answers under adapters, one after the other and again, so that some must come back."""
    greedy = SamplingParams(temperature=0, max_tokens=4)
    answers = []
    with Engine(**options) as engine:
        for _ in range(2):
            for index, (name, path) in enumerate(adapters.items(), start=1):
                lora = LoRARequest(name, index, str(path))
                (output,) = engine.generate([[5, 6, 7]], greedy, lora)
                answers.append(output.outputs[0].token_ids)
    return answers


@pytest.fixture(scope="module")
def expected(options: dict[str, Any], adapters: dict[str, Path]) -> list[list[int]]:
    answers = adapted_answers(options, adapters)
    assert len(set(map(tuple, answers))) == len(adapters)
    return answers


@pytest.mark.parametrize(
    "way",
    [
        {"host_adapter_bytes": "0"},
        {"link_gib_per_s": 4.0},
        {"link_gib_per_s": 4.0, "host_adapter_bytes": "120KiB"},
        {"link_gib_per_s": 4.0, "lora_backend": "numba"},
    ],
    ids=["nothing kept", "copied", "copied from a small arena", "copied packed"],
)
def test_adapters_answer_the_same_and_leave_nothing(
    options: dict[str, Any], adapters: dict[str, Path], expected: list[list[int]],
    way: dict[str, Any], caplog: pytest.LogCaptureFixture, tmp_path: Path,
) -> None:  # fmt: skip
    """The other ways than to read them where they lie."""
    if "link_gib_per_s" in way:
        way = {**way, "profile": profile_of({**options, **way}, tmp_path)}
    before = held(), mapped_segments(), named_segments(os.getpid())
    assert before[1] == 0
    assert adapted_answers({**options, **way}, adapters) == expected
    assert (held(), mapped_segments(), named_segments(os.getpid())) == before
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


def mapped_segments() -> int:
    """Mappings of shared memory of ours, with or without a name."""
    gc.collect()
    maps = Path("/proc/self/maps").read_text()
    return sum("corun-" in line and "(deleted)" in line for line in maps.splitlines())

"""An engine returns all resources of its process, even if it cannot start."""

import logging
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from corun import Engine, LoRARequest, SamplingParams
from corun.gpu.device.cpu import CpuDevice
from corun.gpu.execution import assemble
from corun.runtime.adapters.target_map import TargetMap
from corun.runtime.config.engine import EngineConfig
from corun.runtime.engine.assembly import build, scheduling, sizes
from corun.runtime.engine.assembly.base_model import optional_packages, weights_ahead_bytes
from corun.runtime.engine.assembly.profiling import ProfileListener, run_profile
from corun.runtime.engine.assembly.resources import DeviceFacts, MemoryPlan, plan_memory
from corun.runtime.engine.heartbeat import Heartbeat
from corun.runtime.engine.messages import AddRequest, ModelInfo
from corun.runtime.errors import AdapterError, ConfigError, EngineDeadError, ModelError
from corun.runtime.plan import StepPlan, SubBatchKind
from support.architectures import save_model
from support.fake_core import save_tokenizer
from support.half_made_segment import half_made_segment
from support.model_profiles import save_made_up_profile
from support.peft_adapters import edit_config, save_adapter
from support.residue import held
from transformers import AttentionInterface


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory = save_model("llama3-rope", tmp_path_factory.mktemp("model"))
    save_tokenizer(directory)
    return {
        "model": str(directory),
        "device": "cpu",
        "dtype": "float32",
        "memory_gib": 0.01,
        "linear_backend": "plain",
        "attention_backend": "torch",
        "lora_backend": "torch",
    }


def attention_functions() -> set[str]:
    return {name for name in AttentionInterface._global_mapping if name.startswith("corun")}


class Residue:
    """What this process holds more than when this was made."""

    def __init__(self) -> None:
        self._before, self._functions = held(), attention_functions()

    def found(self) -> list[object]:
        return [*held().since(self._before), *(attention_functions() - self._functions)]


def answer(options: dict[str, Any]) -> list[int]:
    with Engine(**options) as engine:
        (output,) = engine.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=4))
        return output.outputs[0].token_ids


def test_engines_that_are_closed_leave_nothing(options: dict[str, Any]) -> None:
    earlier, functions = held(), attention_functions()
    first = answer(options)
    assert held().threads <= earlier.threads and attention_functions() <= functions
    residue = Residue()
    for _ in range(4):
        assert answer(options) == first
        assert not residue.found()


def test_adapters_of_another_base_are_named_once_a_base(
    options: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = shutil.copytree(options["model"], tmp_path / "Tiny-1B")
    bases = ["x/Other-1B", "x/Other-1B", "x/tiny-1b-bnb-4bit", "x/Tiny-1B", "x/tiny-1b-bnb-4bit"]
    with Engine(**{**options, "model": str(model)}) as engine:
        caplog.clear()
        for number, base in enumerate(bases):
            path = tmp_path / f"adapter-{number}"
            save_adapter(path)
            edit_config(path, base_model_name_or_path=base)
            engine.add_lora(LoRARequest(f"a{number}", number + 1, str(path)))
    other, copied = [one.message for one in caplog.records if one.levelname == "WARNING"]
    assert "adapter-0 is made for x/Other-1B, not for the base model that is served" in other
    assert "adapter-2 is trained over x/tiny-1b-bnb-4bit, an nf4 copy of the base model" in copied


def test_a_small_model_takes_what_it_can_need_and_says_so(
    options: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """By default. Listed adapters count, and as many more."""
    caplog.set_level(logging.INFO, logger="corun")
    name = "corun.runtime.engine.assembly.sizes"
    (tmp_path / "adapter_config.json").touch()
    planned_bytes = []
    for num_bytes in (0, 1 << 20):
        (tmp_path / "adapter_model.safetensors").write_bytes(bytes(num_bytes))
        caplog.clear()
        chosen = {"memory_gib": None, "max_num_seqs": 2, "max_model_len": 32, "max_lora_rank": 1}
        with pytest.raises(AdapterError):  # it is no adapter
            answer(options | chosen | {"lora_modules": (f"a={tmp_path}",)})
        (line,) = [record for record in caplog.records if record.name == name]
        planned_bytes.append(float(line.getMessage().split()[1]) * 2**30)
        assert "2 requests (--max-num-seqs) of 32 tokens" in line.getMessage()
    assert planned_bytes[1] - planned_bytes[0] == pytest.approx(9 << 20, rel=0.05)


def test_a_start_removes_what_the_dead_left_and_nothing_of_the_living(options: dict[str, Any]) -> None:
    with half_made_segment() as left, half_made_segment() as living:
        assert {left.name, living.name} <= set(os.listdir("/dev/shm"))
        left.creator.kill()
        left.creator.wait()
        answer(options)
        names = os.listdir("/dev/shm")
        assert left.name not in names
        assert living.name in names


@pytest.mark.parametrize("step", ["plan_engine_memory", "make_scheduler", "ModelInfo"])
def test_a_failed_start_leaves_nothing(
    options: dict[str, Any], step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer(options)
    residue = Residue()

    def fail(*arguments: Any, **named: Any) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(build, step, fail)
    for _ in range(2):
        with pytest.raises(EngineDeadError, match="ZeroDivisionError: a bug"):
            Engine(**options)
    assert not residue.found()


def test_an_adapter_that_was_named_must_be_servable(options: dict[str, Any], tmp_path: Path) -> None:
    residue = Residue()
    with pytest.raises(Exception, match="adapter 'x'"):
        Engine(**options, lora_modules=(f"x={tmp_path}",))
    assert not residue.found()


@pytest.mark.parametrize("where", ["cpu", "cuda"])
def test_rows_that_decode_are_in_the_pass_of_a_chunk(
    options: dict[str, Any], where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine runs on the CPU: only the scheduler assumes a GPU."""
    make_scheduler = scheduling.make_scheduler

    def make(config: EngineConfig, loaded: Any, *others: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(loaded.model), "device", torch.device(where))
            return make_scheduler(config, loaded, *others)

    monkeypatch.setattr(build, "make_scheduler", make)
    config = EngineConfig(**options)
    assembly = build.build_engine(config, on_progress=lambda _: None, own_process=False)
    try:
        core, executor = assembly.core, assembly.parts.executor
        plans: list[StepPlan] = []
        submit = executor.submit

        def note(plan: StepPlan) -> None:
            plans.append(plan)
            submit(plan)

        monkeypatch.setattr(executor, "submit", note)
        greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        core.add_request(AddRequest(1, (5, 6, 7), greedy, None))
        ended = []
        for number in range(12):
            if number == 3:  # comes while the first one decodes
                core.add_request(AddRequest(2, (8, 9), greedy, None))
            ended += [update for update in core.step(timeout_s=5.0) if update.finish_reason]
        assert [update.finish_reason for update in ended] == ["length", "length"]
    finally:
        assembly.close()
    (both,) = [plan for plan in plans if sorted(num_tokens(plan)) == [1, 2]]
    assert [batch.kind for batch in both.sub_batches] == [SubBatchKind.MIXED]


def test_a_step_publishes_its_layers(options: dict[str, Any]) -> None:
    config = EngineConfig(**options, decode_graphs="off")
    assembly = build.build_engine(config, on_progress=lambda _: None, own_process=False)
    heartbeat = Heartbeat()
    try:
        assembly.publish_to(heartbeat)
        heartbeat.begin_turn()
        greedy = SamplingParams(temperature=0, max_tokens=1)
        assembly.core.add_request(AddRequest(1, (5, 6, 7), greedy, None))
        assert assembly.core.step(timeout_s=5.0)
        num_layers = assembly.parts.loaded.config.num_hidden_layers
        signs = heartbeat.signs()
        assert signs.num_layers == num_layers
        assert signs.num_advances > 3 * num_layers  # and its products
    finally:
        assembly.close()


def num_tokens(plan: StepPlan) -> list[int]:
    """Of each row of a step."""
    return [count for batch in plan.sub_batches for count in batch.num_tokens]


def profile_of(options: dict[str, Any], directory: Path) -> str:
    """Without it, each engine with a link would measure a profile."""
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
    assert choices == {"sync": "host", "link": "2 GiB/s + 5 us"}
    assert len(set(map(id, closed))) == 1
    with pytest.raises(ConfigError, match="--device-sync stream needs a CUDA device"):
        Engine(**options, device_sync="stream")


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate("abc"):
        save_adapter(directory / name, seed=seed, target_modules="all-linear", lora_alpha=64)
    return {name: directory / name for name in "abc"}


def adapted_answers(
    options: dict[str, Any],
    adapters: dict[str, Path],
    infos: list[ModelInfo] | None = None,
    *,
    least_evictions: int = 0,
) -> list[list[int]]:
    """Answers under adapters, one after the other and again, so that some must be reloaded.

    ``infos`` receives the engine's facts.
    """
    greedy = SamplingParams(temperature=0, max_tokens=4)
    answers = []
    with Engine(**options) as engine:
        if infos is not None:
            infos.append(engine.get_model_info())
        for _ in range(2):
            for index, (name, path) in enumerate(adapters.items(), start=1):
                lora = LoRARequest(name, index, str(path))
                (output,) = engine.generate([[5, 6, 7]], greedy, lora)
                answers.append(output.outputs[0].token_ids)
        assert engine.get_stats().num_device_evictions >= least_evictions
    return answers


@pytest.fixture(scope="module")
def expected(options: dict[str, Any], adapters: dict[str, Path]) -> list[list[int]]:
    answers = adapted_answers(options, adapters)
    assert len(set(map(tuple, answers))) == len(adapters)
    return answers


@pytest.mark.parametrize(
    "way",
    [
        {"host_bytes": "0"},
        {"link_gib_per_s": 4.0},
        {"link_gib_per_s": 4.0, "host_bytes": "120KiB"},
        {"link_gib_per_s": 4.0, "lora_backend": "numba"},
    ],
    ids=["nothing kept", "copied", "copied from a small arena", "copied packed"],
)
def test_adapters_answer_the_same_and_leave_nothing(
    options: dict[str, Any],
    adapters: dict[str, Path],
    expected: list[list[int]],
    way: dict[str, Any],
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    """With copies of adapters, in all ways."""
    if "link_gib_per_s" in way:
        way = {**way, "profile": profile_of({**options, **way}, tmp_path)}
    residue = Residue()
    assert adapted_answers({**options, **way}, adapters) == expected
    assert not residue.found()
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


def test_adapters_and_blocks_share_pages_where_these_are_planned(
    options: dict[str, Any],
    adapters: dict[str, Path],
    expected: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """As on CUDA; here only the plan is CUDA's."""

    def plan_as_on_cuda(config: EngineConfig, facts: DeviceFacts, max_model_len: int) -> MemoryPlan:
        return plan_memory(config, replace(facts, type="cuda"), max_model_len)

    monkeypatch.setattr(sizes, "plan_memory", plan_as_on_cuda)
    paced = {**options, "link_gib_per_s": 4.0, "max_lora_rank": 64, "lora_backend": "torch"}
    paced["profile"] = profile_of(paced, tmp_path)
    assert adapted_answers(paced, adapters) == expected
    paced["memory_gib"] = 10 * 2**-17  # ten pages, of which each adapter takes four
    assert adapted_answers(paced, adapters, least_evictions=4) == expected


def test_without_a_profile_requests_wait_for_their_adapters(
    options: dict[str, Any],
    adapters: dict[str, Path],
    expected: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(*arguments: object) -> None:
        raise RuntimeError("the profiler has a bug")

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr("corun.profiles.measure.profiler.measure_profile", fail)
    paced = {**options, "link_gib_per_s": 4.0, "load_strategy": "assisted"}
    infos: list[ModelInfo] = []
    assert adapted_answers(paced, adapters, infos) == expected
    assert "RuntimeError: the profiler has a bug" in caplog.text
    (info,) = infos
    assert info.has_profile_failed
    assert "co-execution is off" in info.summary[-1]


@pytest.mark.parametrize("link_gib_per_s", [None, 1.0])
def test_a_model_that_adapters_cannot_change_is_served(
    options: dict[str, Any],
    link_gib_per_s: float | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Nothing is measured for adapters, and every adapter is refused."""
    expected = answer(options)
    monkeypatch.setattr(assemble, "build_target_map", lambda _: TargetMap((), {}))
    save_adapter(tmp_path)
    with Engine(**options, link_gib_per_s=link_gib_per_s) as engine:
        (output,) = engine.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=4))
        assert output.outputs[0].token_ids == expected
        with pytest.raises(AdapterError, match="the model has no linear module"):
            engine.add_lora(LoRARequest("x", 1, str(tmp_path)))
    assert "adapters cannot target any module of" in caplog.text
    config = EngineConfig(**options, link_gib_per_s=link_gib_per_s)
    listener = ProfileListener(lambda _: None, lambda _: None, lambda _: None)
    num_threads = torch.get_num_threads()
    # It pins the thread that measures, so this runs in a thread of its own.
    with ThreadPoolExecutor(1) as alone, pytest.raises(ModelError, match="nothing to measure"):
        alone.submit(run_profile, config, None, listener).result()
    torch.set_num_threads(num_threads)


def test_an_engine_inside_this_process_keeps_quantised_weights(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    given = options | {"dtype": "bfloat16", "quantization": "int8", "linear_backend": "auto"}
    with Engine(**given):
        pass
    assert len(list(tmp_path.rglob("*.weights"))) == 1


@pytest.mark.parametrize(
    ("options", "share"),
    [
        ({}, 1.0),
        ({"quantization": "int8"}, 0.5),
        ({"quantization": "int4"}, 0.25),
        ({"quantization": "off"}, 0.0),
        ({"dtype": "float32"}, 0.0),
        ({"linear_backend": "onednn"}, 0.0),
        ({"device": "cuda"}, 0.0),
        ({"model": "owner/name"}, 0.0),
    ],
)
def test_pages_are_filled_ahead_only_for_weights_that_need_them(
    tmp_path: Path, options: dict[str, Any], share: float
) -> None:
    size = 1 << 30
    config_file, weights = tmp_path / "config.json", tmp_path / "model.safetensors"
    config_file.write_text('{"torch_dtype": "bfloat16"}')
    weights.touch()
    os.truncate(weights, size)  # a hole
    (tmp_path / "consolidated.safetensors").write_bytes(b"the same weights once more")
    given = EngineConfig(**{"model": str(tmp_path), "device": "cpu"} | options)
    assert weights_ahead_bytes(given, 4 * size) == int(size * share)
    assert weights_ahead_bytes(given, int(2.9 * size * share)) == 0, "too much of what is free"
    weights.rename(tmp_path / "model-00001-of-00001.safetensors")
    assert weights_ahead_bytes(given, 4 * size) == int(size * share)
    assert optional_packages(given.model or "") == (
        ("scipy",) if given.model == "owner/name" else ("scipy", "accelerate")
    )
    config_file.write_text('{"text_config": {"quantization_config": {}}}')
    assert optional_packages(given.model or "") == ("scipy",)
    for text in ('{"dtype": "bfloat16", "quantization_config": {}}', '{"dtype": "float16"}', "[]", "{", ""):
        config_file.write_text(text)
        assert weights_ahead_bytes(given, 4 * size) == 0

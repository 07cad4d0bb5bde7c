"""The engine's turns around real steps."""

from pathlib import Path

import pytest
from corun.gpu.device.cpu import CpuDevice
from corun.gpu.device.link import PacedLink
from corun.gpu.execution.assemble import LoadedModel
from corun.gpu.forward.lower import ForwardInputs
from corun.profiles.profile import ProfileError
from corun.runtime.engine.assembly.turns import TurnTimes, measure_turns
from support.architectures import save_model
from support.executor_device import ExecutorDevice
from support.profiles import PROFILE


def measured(loaded: LoadedModel, link: PacedLink | None = None) -> TurnTimes:
    """Measure on a device of its own."""
    device = CpuDevice(link=link)
    try:
        return measure_turns(loaded, device, PROFILE.model, PROFILE.min_group_bytes)
    finally:
        device.close()


def test_what_the_engine_takes_is_less_than_it_takes_to_measure_it(tmp_path: Path) -> None:
    device = ExecutorDevice(save_model("llama3-rope", tmp_path))
    num_free_rows = device.loaded.lora_table.num_free_rows
    try:
        times = measured(device.loaded)
        assert times.turn_s >= 0.0 and times.row_s >= 0.0
        assert 0.0 < times.turn_s + times.row_s < 1.0
        assert 0.0 < times.request_s < 1.0
        assert 0.0 < times.load_s < 1.0
        assert device.loaded.lora_table.num_free_rows == num_free_rows, "the adapter is gone"
    finally:
        device.executor.close()
        device.loaded.close()


def test_a_load_costs_the_engine_no_more_on_a_slow_link(tmp_path: Path) -> None:
    device = ExecutorDevice(save_model("llama3-rope", tmp_path))
    try:
        late_s = 0.04
        times = measured(device.loaded, PacedLink(latency_us=late_s * 1e6))
        assert 0.0 < times.load_s < late_s / 2, "a thread that only waits could compute"
    finally:
        device.executor.close()
        device.loaded.close()


def test_a_step_that_fails_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = ExecutorDevice(save_model("llama3-rope", tmp_path))

    def fail(runner: object, inputs: ForwardInputs, *others: object) -> None:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr("corun.gpu.execution.runner.ModelRunner.forward", fail)
    try:
        with pytest.raises(ProfileError, match=r"cannot measure .* turns: .*no such kernel"):
            measured(device.loaded)
    finally:
        device.executor.close()
        device.loaded.close()

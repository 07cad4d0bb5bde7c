"""The engine's turns around real steps."""

from pathlib import Path

import pytest
from corun.gpu.forward.lower import ForwardInputs
from corun.profiles.profile import ProfileError
from corun.runtime.engine.assembly.turns import measure_turns
from support.architectures import save_model
from support.executor_device import ExecutorDevice


def test_a_turn_takes_less_than_it_takes_to_measure_it(tmp_path: Path) -> None:
    device = ExecutorDevice(save_model("llama3-rope", tmp_path))
    try:
        turn_s, row_s = measure_turns(device.loaded)
        assert turn_s >= 0.0 and row_s >= 0.0
        assert 0.0 < turn_s + row_s < 1.0
    finally:
        device.executor.close()
        device.loaded.close()


def test_a_step_that_fails_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = ExecutorDevice(save_model("llama3-rope", tmp_path))

    def fail(runner: object, inputs: ForwardInputs, *others: object) -> None:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr("corun.gpu.execution.runner.ModelRunner.forward", fail)
    try:
        with pytest.raises(ProfileError, match=r"turns cannot be measured: .*no such kernel"):
            measure_turns(device.loaded)
    finally:
        device.executor.close()
        device.loaded.close()

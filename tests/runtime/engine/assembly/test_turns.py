"""The engine's turns around real steps."""

from collections.abc import Iterator

import pytest
from corun.gpu.device.cpu import CpuDevice
from corun.gpu.device.link import PacedLink
from corun.gpu.execution.assemble import LoadedModel
from corun.gpu.forward.lower import ForwardInputs
from corun.profiles.profile import ProfileError
from corun.runtime.engine.assembly import turns
from corun.runtime.engine.assembly.turns import TurnTimes, measure_turns
from support.architectures import save_model
from support.executor_device import ExecutorDevice
from support.profiles import PROFILE


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoadedModel]:
    device = ExecutorDevice(save_model("llama3-rope", tmp_path_factory.mktemp("model")))
    yield device.loaded
    device.executor.close()
    device.loaded.close()


def measured(loaded: LoadedModel, link: PacedLink | None = None) -> TurnTimes:
    """Measure on a device of its own."""
    device = CpuDevice(link=link)
    try:
        return measure_turns(loaded, device, PROFILE.model, PROFILE.min_group_bytes)
    finally:
        device.close()


def test_what_the_engine_takes_is_less_than_it_takes_to_measure_it(loaded: LoadedModel) -> None:
    num_free_rows = loaded.lora_table.num_free_rows
    times = measured(loaded)
    assert times.turn_s >= 0.0 and times.row_s >= 0.0
    assert 0.0 < times.turn_s + times.row_s < 1.0
    assert 0.0 < times.request_s < 1.0
    assert 0.0 < times.load_s < 1.0
    assert loaded.lora_table.num_free_rows == num_free_rows, "the adapter is gone"


def test_a_load_costs_the_engine_no_more_on_a_slow_link(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few loads of a link so slow that what a busy machine adds is far below its time."""
    late_s = 0.2
    monkeypatch.setattr(turns, "_NUM_REQUESTS", 3)
    times = measured(loaded, PacedLink(latency_us=late_s * 1e6))
    assert 0.0 < times.load_s < late_s / 2, "a thread that only waits could compute"


def test_a_step_that_fails_is_told(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(runner: object, inputs: ForwardInputs, *others: object) -> None:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr("corun.gpu.execution.runner.ModelRunner.forward", fail)
    with pytest.raises(ProfileError, match=r"cannot measure .* turns: .*no such kernel"):
        measured(loaded)

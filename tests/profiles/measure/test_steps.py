"""Whole steps through a real executor: the requested steps run, and failures are reported."""

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from corun.gpu.execution.executor import DeviceExecutor
from corun.gpu.forward.lower import ForwardInputs
from corun.profiles.curve import Curve
from corun.profiles.measure import steps
from corun.profiles.measure.step_shapes import StepShape, StepSizes, step_point, step_shapes
from corun.profiles.measure.steps import StepBench, WholeStepTimes
from corun.profiles.profile import ProfileError
from corun.profiles.rounds import Repeats
from support.architectures import save_model
from support.executor_device import ExecutorDevice

_BLOCK_SIZE = 4
_SHAPES = step_shapes(
    StepSizes(decode_rows=(1, 2, 4), chunk_tokens=(8, 12), context_tokens=(16, 48), max_kv_tokens=96)
)
_PREFILL = Curve((4.0, 8.0, 16.0), (4e-6, 8e-6, 16e-6))
_ONCE = Repeats(60.0, 1, 1)


@pytest.fixture
def device(tmp_path: Path) -> Iterator[ExecutorDevice]:
    device = ExecutorDevice(save_model("llama3-rope", tmp_path))
    yield device
    device.executor.close()
    device.loaded.close()


def _measure(
    executor: DeviceExecutor,
    shapes: list[StepShape],
    repeats: Repeats = _ONCE,
    forward_s: Callable[[StepShape], float] | None = None,
) -> WholeStepTimes:
    bench = StepBench(executor, forward_s or (lambda _: 1e-6), _BLOCK_SIZE, vocab_size=96)
    return bench.measure(shapes, _PREFILL, repeats, lambda done, total: None)


def test_steps_run_as_they_are_said(device: ExecutorDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    assert StepBench.num_blocks(_SHAPES, _BLOCK_SIZE) <= device.runner.pool.num_blocks
    ran: list[StepShape] = []
    forward = device.runner.forward

    def note(inputs: ForwardInputs, *others: Any) -> torch.Tensor:
        bounds, ends = inputs.attention.query_starts_host, inputs.attention.context_lens_host
        tokens = tuple(b - a for a, b in itertools.pairwise(bounds))
        ran.append(StepShape(tokens, tuple(e - n for e, n in zip(ends, tokens, strict=True))))
        return forward(inputs, *others)

    monkeypatch.setattr(device.runner, "forward", note)
    times = _measure(device.executor, _SHAPES)
    assert ran == [*_SHAPES, *reversed(_SHAPES)]  # once to warm up
    curves = times.prefill_s, times.decode_s
    assert times.record.points == tuple(step_point(shape, *curves) for shape in _SHAPES)
    assert len(times.record.y) == len(_SHAPES) and min(times.record.y) > 0.0
    assert times.left_out == ()


def test_of_repeats_the_least_disturbed_counts(
    device: ExecutorDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 0.0
    token_s = iter([s for s in (9.0, 3.0, 2.0, 5.0) for _ in _SHAPES])  # the first warm up
    forward = device.runner.forward

    def take_time(inputs: ForwardInputs, *others: Any) -> torch.Tensor:
        nonlocal now_s
        now_s += next(token_s) * inputs.attention.num_tokens
        return forward(inputs, *others)

    monkeypatch.setattr(device.runner, "forward", take_time)
    monkeypatch.setattr(steps, "time", SimpleNamespace(perf_counter=lambda: now_s))
    times = _measure(device.executor, _SHAPES, Repeats(1e9, 3, 3))
    assert times.record.y == tuple(2.0 * shape.total_tokens for shape in _SHAPES)
    assert times.typical_over_fastest == 1.5


def test_forwards_are_those_beside_the_steps(device: ExecutorDevice) -> None:
    ran: list[tuple[bool, int]] = []
    sizes = {(shape.is_decode, shape.total_tokens) for shape in _SHAPES}

    def forward_s(shape: StepShape) -> float:
        round_s = (9.0, 3.0, 2.0, 5.0)[len(ran) // len(sizes)]  # the first warms up
        ran.append((shape.is_decode, shape.total_tokens))
        return round_s * shape.total_tokens * 1e-6

    times = _measure(device.executor, _SHAPES, Repeats(1e9, 3, 3), forward_s)
    assert sorted(ran) == sorted(4 * [*sizes])
    assert times.decode_s.x == (1, 2, 4) and times.decode_s.y == pytest.approx((2e-6, 4e-6, 8e-6))
    # Measured are 8 and 12 tokens; the others are as much slower than they were.
    assert times.prefill_s.x == (4, 8, 12, 16)
    assert times.prefill_s.y == pytest.approx((8e-6, 16e-6, 24e-6, 32e-6))


def test_a_step_that_fails_is_no_measurement(device: ExecutorDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any) -> torch.Tensor:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(device.runner, "forward", fail)
    with pytest.raises(ProfileError, match=r"a step cannot be measured.*out of memory"):
        _measure(device.executor, _SHAPES)

"""Reports of kernels that are being compiled."""

import sys
import threading
from types import SimpleNamespace
from typing import Any

import numba
import pytest
import torch
from corun.gpu.execution import compilation
from corun.gpu.execution.compilation import compilation_published, compilation_reported
from corun.runtime.engine.heartbeat import Heartbeat, LoopActivity
from numba.extending import overload


def compiled(said: list[str], module: str) -> Any:
    """Compile a function and its callee as if they came from ``module``."""

    def callee(x: int) -> int:
        return x + 1

    def kernel(x: int) -> Any:
        return inner(x)

    for function in (callee, kernel):
        function.__module__ = module
    inner = numba.njit(callee)
    outer = numba.njit(kernel)
    with compilation_reported(said.append):
        assert outer(1) == 2
        assert outer(2) == 3  # is compiled
    return outer


def test_says_which_group_begins_and_how_much_it_was() -> None:
    said: list[str] = []
    kernel = compiled(said, "corun.cpu_workers.kernels.linear.multiply")
    assert said[0] == "compiling kernels for linear products; at most 3 of 6 groups follow"
    assert said[-1].startswith("compiled 1 kernels in ")
    said.clear()
    with compilation_reported(said.append):
        assert kernel(3) == 4
    assert said == []


def test_compilations_of_the_engines_thread_are_published() -> None:
    seen: list[LoopActivity] = []
    heartbeat = Heartbeat()

    def looks(x: int) -> int:
        return x

    def kernel(x: int) -> int:
        return looks(x)

    @overload(looks, strict=False)  # type: ignore[untyped-decorator]  # numba has no types
    def compiled_looks(x: int) -> Any:
        seen.append(heartbeat.signs().activity)
        return lambda x: x + 1

    with compilation_published(heartbeat):
        assert numba.njit(kernel)(1) == 2
        signs = heartbeat.signs()
        assert signs.num_kernels >= 1 and signs.activity is LoopActivity.WORKING
        assert seen and set(seen) == {LoopActivity.COMPILING}
        elsewhere = threading.Thread(target=lambda: numba.njit(lambda x: x + 2)(1))
        elsewhere.start()
        elsewhere.join()
        assert heartbeat.signs() == signs
    numba.njit(lambda x: x + 3)(1)
    assert heartbeat.signs() == signs


def test_kernels_that_take_long_get_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilation, "_REPORTED_S", 0.0)
    said: list[str] = []
    compiled(said, "elsewhere")
    assert said[0].startswith("compiled kernel in ")


def test_the_stage_goes_on_after_a_kernel_that_took_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilation, "_REPORTED_S", 0.0)
    said: list[str] = []
    with compilation_reported(said.append) as begin_stage:
        begin_stage("quantising")
        assert numba.njit(lambda x: x + 4)(1) == 5
    assert said[0] == said[2] == "quantising"
    assert said[1].startswith("compiled ")


def test_without_triton_there_is_nothing_to_listen_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setitem(sys.modules, "triton", None)
    with compilation_reported(pytest.fail):
        pass


def test_triton_is_listened_to_for_as_long(monkeypatch: pytest.MonkeyPatch) -> None:
    knobs = pytest.importorskip("triton.knobs")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    before = knobs.compilation.listener
    said: list[str] = []
    with compilation_reported(said.append):
        tell = knobs.compilation.listener
        source, times = SimpleNamespace(name="_decode"), SimpleNamespace(total=2_500_000)
        tell(src=source, metadata={}, metadata_group={}, times=times, cache_hit=False)
        tell(src=source, metadata={}, metadata_group={}, times=times, cache_hit=True)
    assert knobs.compilation.listener is before
    assert said == [
        "compiled decode in 2.5 s",
        "compiled 1 kernels in 2.5 s; they are kept for the next start",
    ]

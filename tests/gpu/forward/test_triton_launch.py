"""Launches of Triton kernels: the variant that Triton would choose, and its own way otherwise."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.triton.program import run_triton_program

pytest.importorskip("triton")


def test_a_launch_calls_the_variant_that_triton_chooses() -> None:
    counted = json.loads(run_triton_program("check_launch"))
    # Only numbers of 64 bits that are not specialised, a third of all, go through Triton again.
    assert counted["of Triton"] == counted["launches"] // 3 > 0
    assert counted["variants"] > 100


def test_a_triton_of_an_unknown_form_launches_in_its_own_way(caplog: pytest.LogCaptureFixture) -> None:
    from corun.gpu.forward.triton_launch import KernelLauncher

    calls: list[tuple[Any, ...]] = []

    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            def run(*arguments: Any, **constants: Any) -> object:
                calls.append((grid, *arguments, constants))
                return SimpleNamespace(run=None)

            return run

    launch, x = KernelLauncher(Kernel()), torch.zeros(2)
    for _ in range(3):
        launch((1,), x, 5, SIZE=7)
    assert calls == [((1,), x, 5, {"SIZE": 7})] * 3
    assert [record.getMessage() for record in caplog.records] == [
        "Triton kernels are launched in Triton's own way, which is slower: "
        "SimpleNamespace of this Triton is not of the known form"
    ]

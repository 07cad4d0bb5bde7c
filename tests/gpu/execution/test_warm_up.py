"""The passes of a start use every variant of the kernels: serving needs no other."""

import json
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from corun.gpu.execution import assemble
from corun.gpu.execution.assemble import warm_up
from support.architectures import save_model
from support.executor_device import ExecutorDevice
from support.triton.program import run_triton_program
from transformers import PreTrainedModel

# Layers of two kinds, one with a window so small that its contexts are never divided; heads with
# rows that are consecutive in memory; queries, keys and values in one tensor.
MODELS = ("gemma2", "odd-heads", "phi3")
# Beside those of attention and LoRA; norms of sums and without, rotations with and without a pool.
FUSED = {
    "gemma2": {"norm_kernel": 3, "gated_kernel": 1, "rotate_kernel": 2},
    "odd-heads": {"rotate_kernel": 5},
    "phi3": {"norm_kernel": 2, "gated_kernel": 1, "rotate_kernel": 2},
}


def count(device: str, num_passes: int = 120) -> dict[str, dict[str, int]]:
    """Warmed variants, by model and kernel; serving uses no other."""
    pytest.importorskip("triton")
    counted = json.loads(run_triton_program("count_variants", device, str(num_passes), *MODELS))
    for name, model in counted.items():
        assert model["more"] == [], name
    return {name: model["warmed"] for name, model in counted.items()}


@pytest.mark.parametrize("num_passes", [45, pytest.param(120, marks=pytest.mark.full)])
def test_serving_asks_for_no_variant_that_was_not_warmed(num_passes: int) -> None:
    counted = count("cpu", num_passes)
    assert tuple(counted) == MODELS
    for name, warmed in counted.items():
        # Prefill, and decode with 1, 2, 4, 8, 16 and 32 parts of a context; with a small window 1.
        num_attend = 7 + (2 if name == "gemma2" else 0)
        assert warmed == {
            "attend_kernel": num_attend,
            "merge_kernel": 5,
            "shrink_kernel": 2,  # for few tokens and many
            "expand_each_kernel": 2,  # with factors, too
            "expand_kernel": 2,
            **FUSED[name],
        }, name


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_serving_compiles_no_kernel_on_a_gpu() -> None:
    assert count("cuda")[MODELS[0]].keys() >= {"attend_kernel", "shrink_kernel"}


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ExecutorDevice]:
    device = ExecutorDevice(save_model("gemma2", tmp_path_factory.mktemp("model")))
    yield device
    device.executor.close()
    device.loaded.close()


def test_a_warm_up_leaves_nothing_behind(device: ExecutorDevice) -> None:
    loaded, told = device.loaded, list[str]()
    num_free = loaded.lora_table.num_free_rows
    targets = loaded.target_map.targets
    args = device.runner, loaded.lora_table, loaded.lora_backend, targets
    num_passes = warm_up(*args, 9, told.append)
    assert num_passes == 8  # prefill, contexts of 1, 2, 4, 8 and 9, and two with factors
    assert told == ["warming up: 8 passes, so that serving compiles no kernel"]
    assert loaded.lora_table.num_free_rows == num_free


@pytest.mark.parametrize("where", ["cpu", "cuda"])
def test_a_gpus_kernels_are_warmed_and_those_of_the_cpu_are_not(
    where: str, device: ExecutorDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths: list[int] = []
    monkeypatch.setattr(assemble, "warm_up", lambda *arguments: lengths.append(arguments[4]))
    model = SimpleNamespace(device=torch.device(where))
    loaded = replace(device.loaded, model=cast(PreTrainedModel, model))
    assemble.warm_up_kernels(loaded, device.runner, 64, lambda text: None)
    assert lengths == ([64] if where == "cuda" else [])

"""The inputs of the sampler that change logits: both kernels against their definition."""

from pathlib import Path

import numpy as np
import pytest
import torch
from corun.gpu.execution.logit_inputs import LogitInputs
from corun.gpu.execution.token_rules import mask_of
from corun.gpu.forward.upload import upload
from support.logits import LogitCase
from support.triton.program import run_triton_program


def applied(case: LogitCase, device: str = "cpu") -> np.ndarray:
    logits = case.tensors(device)[0]
    inputs = LogitInputs(logits.shape[1])
    for row, mask in zip(case.mask_rows, case.masks, strict=True):
        inputs.allow(int(row), mask)
    for row, token, value in case.entries:
        inputs.add(row, [token], [value])
    inputs.apply(logits, upload(inputs.arrays(), logits.device))
    return logits.cpu().numpy()


@pytest.mark.parametrize("num_columns", [1, 31, 32, 33, 64, 1000, 151_640])
def test_equals_the_definition(num_columns: int) -> None:
    case = LogitCase(num_columns, seed=num_columns)
    assert np.array_equal(applied(case), case.expected())


def test_masks_of_one_row_are_joined_and_short_ones_lack_the_last_tokens() -> None:
    logits, inputs = torch.zeros(2, 100), LogitInputs(100)
    inputs.allow(1, mask_of([3, 40, 70, 99]), mask_of([3, 40, 41]), mask_of(range(200)))
    inputs.apply(logits, upload(inputs.arrays(), logits.device))
    assert torch.isfinite(logits[0]).all()
    assert torch.isfinite(logits[1]).nonzero()[:, 0].tolist() == [3, 40]


def test_the_triton_kernels_equal_the_definition_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    run_triton_program("check_logits", "interpret", TRITON_INTERPRET="1")


@pytest.mark.parametrize("cards", [("86",), pytest.param(("80", "89", "90"), marks=pytest.mark.full)])
def test_the_triton_kernels_compile_for_gpus_that_are_not_here(
    cards: tuple[str, ...], tmp_path: Path
) -> None:
    pytest.importorskip("triton")
    run_triton_program("check_logits", "compile", *cards, TRITON_CACHE_DIR=str(tmp_path))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("num_columns", [33, 151_640])
def test_equals_the_definition_on_a_gpu(num_columns: int) -> None:
    case = LogitCase(num_columns)
    assert np.array_equal(applied(case, "cuda"), case.expected())

"""Decode passes that are padded for CUDA graphs give what the modules give."""

from pathlib import Path

import pytest
from support.architectures import save_model
from support.triton.program import run_triton_program


@pytest.mark.parametrize("architecture", ["llama3-rope", pytest.param("gemma2", marks=pytest.mark.full)])
def test_padded_passes_in_the_interpreter(architecture: str, tmp_path: Path) -> None:
    run_triton_program("check_graphs", str(save_model(architecture, tmp_path)), "cpu", TRITON_INTERPRET="1")


@pytest.mark.gpu
@pytest.mark.parametrize("architecture", ["llama3-rope", "gemma2", "mixtral"])
def test_graphs_on_a_gpu(architecture: str, tmp_path: Path) -> None:
    run_triton_program("check_graphs", str(save_model(architecture, tmp_path)), "cuda")

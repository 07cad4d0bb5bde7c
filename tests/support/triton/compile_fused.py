"""Compiles the Triton kernels between products for an H100, without a device; run as a program.

``python -m support.triton.compile_fused ARCHITECTURE...``: installs them into a model of each and
runs it; every launch of them only compiles. Prints one JSON object: by architecture, the
instructions for floating-point numbers in the PTX of each kernel's variants.
"""

import json
import re
import sys
from typing import Any
from unittest import mock

import torch
from corun.gpu.fused import install
from corun.gpu.fused import triton_kernels as fused_kernels
from corun.gpu.fused.install import install_fused_kernels, triton_kernels
from corun.gpu.model.probe import ProbeRow, record_attention
from support.architectures import make_model
from support.triton.check_fused import make_runner
from support.triton.count_variants import Hopper
from triton.runtime import driver
from triton.runtime.jit import JITFunction


def instructions(architecture: str) -> dict[str, list[str]]:
    """Compile what a model needs, in bfloat16."""
    used: dict[str, set[str]] = {}
    run: Any = JITFunction.run

    def compile_only(kernel: Any, *arguments: Any, **named: Any) -> None:
        if kernel.fn.__module__ != fused_kernels.__name__:
            return
        compiled = run(kernel, *arguments, **{**named, "warmup": True})
        assert compiled.asm["cubin"]
        found = re.findall(r"^\s*(\w+)\.\S*f(?:16|32)\S* ", compiled.asm["ptx"], re.MULTILINE)
        used.setdefault(kernel.__name__, set()).update(found)

    with (
        mock.patch.object(JITFunction, "run", compile_only),
        mock.patch.object(install, "agree", return_value=True),  # nothing is computed
        torch.inference_mode(),
    ):
        model = make_model(architecture).bfloat16()
        hook, runner = make_runner(model)
        kernels = triton_kernels(torch.bfloat16, torch.device("cpu"))
        install_fused_kernels(model, lambda: record_attention(model, hook), kernels)
        runner.probe_step([ProbeRow(0, 0, (1, 2, 3))])
    return {name: sorted(one) for name, one in used.items()}


def main(*architectures: str) -> None:
    """Print the instructions of each."""
    driver.set_active(Hopper())
    json.dump({name: instructions(name) for name in architectures}, sys.stdout)


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Runs the Triton kernel of the sampler in a process of its own: ``interpret`` or ``compile``."""

import sys

import numpy as np
from support.logits import LogitCase

_POINTERS = {"logits": "*fp32", "masks": "*i32", "mask_rows": "*i32", "entries": "*i32"}


def interpret() -> None:
    """Compare with the definition."""
    from corun.gpu.execution.triton_kernels import adjust_logits_on_cuda

    for num_columns in (1, 31, 32, 1024, 2500):
        case = LogitCase(num_columns)
        logits, masks, mask_rows, entries = case.tensors()
        adjust_logits_on_cuda(logits, masks, mask_rows, entries)
        assert np.array_equal(logits.numpy(), case.expected()), num_columns
        logits, masks, mask_rows, _ = case.tensors()
        adjust_logits_on_cuda(logits, masks, mask_rows, entries[:, :0])
        case.entries = []
        assert np.array_equal(logits.numpy(), case.expected()), num_columns
        logits, masks, mask_rows, _ = case.tensors()
        adjust_logits_on_cuda(logits, masks[:0], mask_rows[:0], entries)
        assert np.isfinite(logits[1].numpy()).all()


def compile_for_gpus() -> None:
    """Compile to machine code for A100 and H100, without a device."""
    import triton
    from corun.gpu.execution.triton_kernels import adjust_logits_kernel as kernel
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    source = ASTSource(
        fn=kernel,
        signature={n: "constexpr" if n == "BLOCK" else _POINTERS.get(n, "i32") for n in names},
        constexprs={(names.index("BLOCK"),): 1024},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in _POINTERS},
    )
    for capability in (80, 90):
        assert triton.compile(source, target=GPUTarget("cuda", capability, 32)).asm["cubin"]


if __name__ == "__main__":
    {"interpret": interpret, "compile": compile_for_gpus}[sys.argv[1]]()

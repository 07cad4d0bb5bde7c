"""Runs the Triton LoRA kernels in a process of their own: ``interpret``, or compiles for a card."""

import re
import sys
from functools import partial

import torch
from corun.gpu.lora.triton_backend import DECODE_TILES, PREFILL_TILES, Tiles, TritonLora
from support.lora import CASES, LoraCase, check_case, check_factors, check_group

_SMALLEST_SHARED_BYTES = 99 << 10  # of a block, on sm_86 and sm_89

# The interpreter runs one program at a time: rather many shapes than large ones.
SMALL = (
    LoraCase("decode", 72, 96, (8, 1, 3, 17, 64), tuple((i, i + 1, i) for i in range(5)), 5),
    LoraCase("several splits", 300, 48, (16,), ((0, 3, 0),), 3),
    LoraCase("prefill", 80, 140, (40, 8), ((1, 40, 0), (44, 50, 1), (50, 51, 0)), 53),
)


def interpret() -> None:
    """bfloat16 is left out: the interpreter computes it wrongly.

    Targets of one input are launched together in any type alike, so these are of one type alone.
    """
    check_group(partial(TritonLora, dtype=torch.float32), torch.float32, max_rank=24)
    quick = [case for case in CASES if case.name in {"odd", "missing target", "only missing"}]
    for dtype in (torch.float32, torch.float16):
        for case in (*SMALL, *quick):
            check_case(case, partial(TritonLora, dtype=dtype), dtype)
        for num_tokens in (7, 60):
            check_factors(partial(TritonLora, dtype=dtype), dtype, num_tokens=num_tokens)


def compile_for(capability: int) -> None:
    """Compile both kernels to machine code for a GPU, without a device."""
    import triton
    from corun.gpu.lora.triton_kernels import expand_kernel, shrink_kernel
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    for kernel, has_factors in ((shrink_kernel, False), (expand_kernel, False), (expand_kernel, True)):
        for tiles in (DECODE_TILES, PREFILL_TILES):
            constants = _constants(tiles, kernel is shrink_kernel)
            if kernel is expand_kernel:
                constants["HAS_FACTORS"] = has_factors
            names = kernel.arg_names
            source = ASTSource(
                fn=kernel,
                signature={name: _type_of(name, constants) for name in names},
                constexprs={(names.index(name),): value for name, value in constants.items()},
                attrs={
                    (number,): [["tt.divisibility", 16]]
                    for number, name in enumerate(names)
                    if name not in kernel.do_not_specialize and _is_aligned(name, constants)
                },
            )
            compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32))
            assert compiled.asm["cubin"]
            assert "mma" in compiled.asm["ptx"], "16-bit products must use the tensor cores"
            assert compiled.metadata.shared <= _SMALLEST_SHARED_BYTES
            # x, y and the matrices are of 16 bits, the rest of 32 or 64.
            single = re.findall(r"ld\.global\S*\.[bus]16\b", compiled.asm["ptx"])
            assert not single, (kernel.__name__, "values must be read in vectors", single)


def _constants(tiles: Tiles, is_shrink: bool) -> dict[str, object]:
    common = {"NUM_SPLITS": tiles.num_splits, "BLOCK_TOKENS": tiles.tokens, "BLOCK_RANKS": tiles.ranks}
    if is_shrink:
        return {**common, "BLOCK_IN": tiles.shrink_in, "PRECISION": "ieee"}
    return {**common, "BLOCK_OUT": tiles.expand_out, "PRECISION": "tf32x3", "ALIGNMENT": 16}


def _type_of(name: str, constants: dict[str, object]) -> str:
    if name in constants:
        return "constexpr"
    pointers = {
        "x": "*bf16",
        "y": "*bf16",
        "hidden": "*fp32",
        "scalings": "*fp32",
        "a_pointers": "*i64",
        "b_pointers": "*i64",
        "factor_pointers": "*i64",
        "segment_starts": "*i32",
        "segment_ends": "*i32",
        "table_rows": "*i32",
        "members": "*i32",
        "tiles": "*i32",
        "ranks": "*i32",
    }
    return pointers.get(name, "i32")


def _is_aligned(name: str, constants: dict[str, object]) -> bool:
    """What a launch finds to be a multiple of 16 for every usual model."""
    is_width = name in {"in_features", "x_stride", "y_stride"}
    return is_width or _type_of(name, constants).startswith("*")


if __name__ == "__main__":
    interpret() if sys.argv[1] == "interpret" else compile_for(int(sys.argv[1]))

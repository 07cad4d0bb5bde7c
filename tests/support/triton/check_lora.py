"""Runs the Triton LoRA kernels in a process of their own: ``interpret``, or compiles for a card."""

import re
import sys
from functools import partial

import torch
from corun.gpu.lora.triton_backend import FEW_TILES, MANY_TILES, Tiles, TritonLora
from support.lora import CASES, LoraCase, check_case, check_factors, check_group
from support.triton.program import spilled_bytes

_SMALLEST_SHARED_BYTES = 99 << 10  # of a block, on sm_86 and sm_89

# The interpreter runs one program at a time: rather many shapes than large ones.
SMALL = (
    LoraCase("decode", 72, 96, (8, 1, 3, 17, 64), tuple((i, i + 1, i) for i in range(5)), 5),
    LoraCase("several splits", 300, 48, (16,), ((0, 3, 0),), 3),
    LoraCase("prefill", 600, 140, (40, 8), ((1, 40, 0), (44, 50, 1), (50, 51, 0)), 53),
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
    from corun.gpu.lora import triton_kernels
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    for name, tiles, has_factors in (
        ("shrink_kernel", FEW_TILES, False),
        ("expand_each_kernel", FEW_TILES, False),
        ("expand_each_kernel", FEW_TILES, True),
        ("shrink_kernel", MANY_TILES, False),
        ("expand_kernel", MANY_TILES, False),
        ("expand_kernel", MANY_TILES, True),
    ):
        kernel = getattr(triton_kernels, name)
        constants, options = _constants(name, tiles, has_factors=has_factors)
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
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        uses_tensor_cores = "mma" in compiled.asm["ptx"]
        assert uses_tensor_cores == (name != "expand_each_kernel"), "16-bit products must use them"
        assert compiled.metadata.shared <= _SMALLEST_SHARED_BYTES
        assert spilled_bytes(compiled.asm["cubin"]) == 0, name
        # x, y and the matrices are of 16 bits, the rest of 32 or 64.
        single = re.findall(r"ld\.global\S*\.[bus]16\b", compiled.asm["ptx"])
        assert not single, (name, "values must be read in vectors", single)


def _constants(name: str, tiles: Tiles, *, has_factors: bool) -> tuple[dict[str, object], dict[str, int]]:
    """What a kernel is compiled with: its own constants, and the compiler's options."""
    is_each = name == "expand_each_kernel"
    constants: dict[str, object] = {"NUM_SPLITS": tiles.num_splits}
    constants["BLOCK_TOKENS"] = tiles.tokens if is_each else max(16, tiles.tokens)
    if not is_each:
        constants["PRECISION"] = "ieee" if name == "shrink_kernel" else "bf16"
    if name.startswith("shrink"):
        constants |= {"BLOCK_RANKS": tiles.shrink_ranks, "BLOCK_IN": tiles.shrink_in}
        return constants, {"num_warps": tiles.shrink_warps, "num_stages": tiles.shrink_stages}
    constants |= {"BLOCK_RANKS": tiles.expand_ranks, "BLOCK_OUT": tiles.expand_out}
    constants |= {"HAS_FACTORS": has_factors, "ALIGNMENT": 16}
    return constants, {"num_warps": tiles.expand_warps, "num_stages": tiles.expand_stages}


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

"""Compile the Triton attention kernels for GPUs that are not here; run as a program.

The interpreter accepts much that the compiler refuses, so this is the only check of the compiled
path on a machine without a GPU. ``python -m support.triton.compile_attention CAPABILITY...``
compiles all for the first of these cards, and tiles for wide heads for the others. Prints one JSON
object: for each kernel the size of its binary, the shared memory of one of its programs and what a
card of that kind has, in bytes.
"""

import json
import sys
from typing import Any

import triton
from corun.gpu.attention import triton_kernels
from corun.gpu.attention.triton_backend import tile_shape
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

# Shared memory that one block may have, by compute capability (CUDA programming guide).
SHARED_BYTES = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10}
ELEMENTS = ("query", "key", "value", "key_blocks", "value_blocks", "out", "sinks")
INTEGERS = ("query_starts", "context_lens", "block_tables")
HEADS = {"HEADS": 14, "GROUP": 7, "GROUP_PAD": 8, "BLOCK_SIZE": 16}


def _type_of(name: str) -> str:
    if name in ELEMENTS:
        return "*bf16"
    if name in INTEGERS:
        return "*i32"
    if name == "slot_mapping":
        return "*i64"
    if name.startswith("partial_"):
        return "*fp32"
    return "fp32" if name in {"scaling", "softcap"} else "i32"


def _is_aligned(name: str) -> bool:
    """What is a multiple of 16 for every usual model, where the launch would say so."""
    return _type_of(name).startswith("*") or name.startswith(("key_stride_", "value_stride_"))


def _compile(kernel: Any, capability: int, **constants: Any) -> dict[str, int]:
    names = kernel.arg_names
    source = ASTSource(
        fn=kernel,
        signature={n: "constexpr" if n in constants else _type_of(n) for n in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={
            (number,): [["tt.divisibility", 16]]
            for number, name in enumerate(names)
            if name not in constants and name not in kernel.do_not_specialize and _is_aligned(name)
        },
    )
    target = GPUTarget("cuda", capability, 32)
    compiled = triton.compile(source, target=target, options={"num_warps": 4, "num_stages": 2})
    return {
        "binary_bytes": len(compiled.asm["cubin"]),
        "shared_bytes": compiled.metadata.shared,
        "limit_bytes": SHARED_BYTES[capability],
    }


def _tiles(capability: int, dims: dict[str, int], *, is_decode: bool) -> dict[str, int]:
    tile_m, tile_n = tile_shape(
        HEADS["GROUP_PAD"], dims["KEY_PAD"], dims["VALUE_PAD"], 2, SHARED_BYTES[capability],
        is_decode=is_decode,
    )  # fmt: skip
    return {"TILE_M": tile_m, "TILE_N": tile_n, "NUM_SPLITS": 4 if is_decode else 1}


def _compile_all(capability: int) -> dict[str, dict[str, int]]:
    """Every kernel, the main one for decode and for prefill, of a model with everything."""
    dims = {"KEY_DIM": 96, "VALUE_DIM": 64, "KEY_PAD": 128, "VALUE_PAD": 64}
    options = {"WINDOW": 512, "HAS_SOFTCAP": True, "HAS_SINKS": True}
    kernels = triton_kernels
    merge = {"VALUE_DIM": 96, "VALUE_PAD": 128, "NUM_SPLITS": 4}
    compiled = {
        "write_kv": _compile(kernels.write_kv_kernel, capability, BLOCK_SIZE=16, **dims),
        "merge": _compile(kernels.merge_kernel, capability, **merge),
    }
    for name, is_decode in (("decode", True), ("prefill", False)):
        tiles = _tiles(capability, dims, is_decode=is_decode)
        compiled[name] = _compile(
            kernels.attend_kernel, capability, **dims, **HEADS, **options, **tiles
        )
    return compiled


def _compile_wide(capability: int, *, is_decode: bool) -> dict[str, int]:
    """Heads of 256, of which tiles of the usual size do not fit every card."""
    dims = {"KEY_DIM": 256, "VALUE_DIM": 256, "KEY_PAD": 256, "VALUE_PAD": 256}
    options = {"WINDOW": 0, "HAS_SOFTCAP": False, "HAS_SINKS": False}
    tiles = _tiles(capability, dims, is_decode=is_decode)
    return _compile(triton_kernels.attend_kernel, capability, **dims, **HEADS, **options, **tiles)


def main(card: str, *capabilities: str) -> None:
    """Compile all kernels for the first card, and what is tight for the others."""
    all_kernels = _compile_all(int(card))
    compiled = {f"sm_{card} {name}": kernel for name, kernel in all_kernels.items()}
    for name, is_decode in (("prefill", False), ("decode", True)):
        for capability in map(int, capabilities):
            compiled[f"sm_{capability} {name} 256"] = _compile_wide(capability, is_decode=is_decode)
    json.dump(compiled, sys.stdout)


if __name__ == "__main__":
    main(*sys.argv[1:])

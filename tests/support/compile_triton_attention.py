"""Compile the Triton attention kernels for a Hopper GPU, which needs none; run as a program.

The interpreter accepts much that the compiler refuses, so this is the only check of the compiled
path on a machine without a GPU. Prints the size of each binary in bytes as one JSON object.
"""

import json
import sys
from typing import Any

import triton
from corun.gpu.attention import triton_kernels
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

HOPPER = GPUTarget("cuda", 90, 32)
ELEMENTS = ("query", "key", "value", "key_blocks", "value_blocks", "out", "sinks")
INTEGERS = ("query_starts", "context_lens", "block_tables")


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


def _compile(kernel: Any, **constants: Any) -> int:
    names = kernel.arg_names
    signature = {n: "constexpr" if n in constants else _type_of(n) for n in names}
    indexed = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=indexed)
    return len(triton.compile(source, target=HOPPER, options={"num_warps": 4}).asm["cubin"])


def main() -> None:
    """Compile every kernel, the main one for decode and for prefill."""
    dims = {"KEY_DIM": 96, "VALUE_DIM": 64, "KEY_PAD": 128, "VALUE_PAD": 64}
    heads = {"HEADS": 14, "GROUP": 7, "GROUP_PAD": 8, "BLOCK_SIZE": 16}
    options = {"WINDOW": 512, "HAS_SOFTCAP": True, "HAS_SINKS": True}
    decode = {"NUM_SPLITS": 4, "TILE_M": 16, "TILE_N": 64}
    prefill = {"NUM_SPLITS": 1, "TILE_M": 64, "TILE_N": 64}
    attend = triton_kernels.attend_kernel
    sizes = {
        "write_kv": _compile(triton_kernels.write_kv_kernel, BLOCK_SIZE=16, **dims),
        "decode": _compile(attend, **dims, **heads, **options, **decode),
        "prefill": _compile(attend, **dims, **heads, **options, **prefill),
        "merge": _compile(triton_kernels.merge_kernel, VALUE_DIM=96, VALUE_PAD=128, NUM_SPLITS=4),
    }
    json.dump(sizes, sys.stdout)


if __name__ == "__main__":
    main()

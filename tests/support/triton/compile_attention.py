"""Compile the Triton attention kernels for GPUs that are not here; run as a program.

The interpreter accepts much that the compiler refuses, so this is the only check of the compiled
path on a machine without a GPU. ``python -m support.triton.compile_attention CAPABILITY...``
compiles for these cards. Prints one JSON object: for each kernel the size of its binary, the shared
memory of one of its programs, what a card of that kind has, and what a thread has in memory because
its registers are full, in bytes.
"""

import json
import sys
from typing import Any

import triton
from corun.gpu.attention import triton_kernels
from corun.gpu.attention.triton_backend import num_stages, num_warps, tile_shape
from support.triton.program import spilled_bytes
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

# Shared memory that one block may have, by compute capability (CUDA programming guide).
SHARED_BYTES = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10}
ELEMENTS = ("query", "key", "value", "key_blocks", "value_blocks", "out", "sinks")
INTEGERS = ("query_starts", "context_lens", "block_tables")
# Heads of an unusual size with everything; the usual ones; those of Qwen 2.5 7B; and wide ones, as
# Gemma 2 has them, of which tiles of the usual size do not fit every card.
LAYERS = {
    "odd": {
        "HEADS": 14,
        "GROUP": 7,
        "GROUP_PAD": 8,
        "KEY_DIM": 96,
        "VALUE_DIM": 64,
        "KEY_PAD": 128,
        "VALUE_PAD": 64,
        "WINDOW": 512,
        "HAS_SOFTCAP": True,
        "HAS_SINKS": True,
    },
    "128": {
        "HEADS": 32,
        "GROUP": 4,
        "GROUP_PAD": 4,
        "KEY_DIM": 128,
        "VALUE_DIM": 128,
        "KEY_PAD": 128,
        "VALUE_PAD": 128,
        "WINDOW": 0,
        "HAS_SOFTCAP": False,
        "HAS_SINKS": False,
    },
    "7 of 128": {
        "HEADS": 28,
        "GROUP": 7,
        "GROUP_PAD": 8,
        "KEY_DIM": 128,
        "VALUE_DIM": 128,
        "KEY_PAD": 128,
        "VALUE_PAD": 128,
        "WINDOW": 0,
        "HAS_SOFTCAP": False,
        "HAS_SINKS": False,
    },
    "256": {
        "HEADS": 16,
        "GROUP": 2,
        "GROUP_PAD": 2,
        "KEY_DIM": 256,
        "VALUE_DIM": 256,
        "KEY_PAD": 256,
        "VALUE_PAD": 256,
        "WINDOW": 4096,
        "HAS_SOFTCAP": True,
        "HAS_SINKS": False,
    },
}


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


def _compile(kernel: Any, capability: int, warps: int, **constants: Any) -> dict[str, int]:
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
    compiled = triton.compile(
        source,
        target=target,
        options={"num_warps": warps, "num_stages": num_stages(SHARED_BYTES[capability])},
    )
    return {
        "binary_bytes": len(compiled.asm["cubin"]),
        "shared_bytes": compiled.metadata.shared,
        "limit_bytes": SHARED_BYTES[capability],
        "spilled_bytes": spilled_bytes(compiled.asm["cubin"]),
    }


def _attend(capability: int, layer: dict[str, Any], *, is_decode: bool) -> dict[str, int]:
    tile_m, tile_n = tile_shape(
        layer["GROUP_PAD"],
        layer["KEY_PAD"],
        layer["VALUE_PAD"],
        2,
        SHARED_BYTES[capability],
        is_decode=is_decode,
    )
    return _compile(
        triton_kernels.attend_kernel,
        capability,
        num_warps(tile_m, layer["VALUE_PAD"]),
        **layer,
        BLOCK_SIZE=16,
        IS_DECODE=is_decode,
        QUERY_ALIGNMENT=8,
        NUM_SPLITS=4 if is_decode else 1,
        TILE_M=tile_m,
        TILE_N=tile_n,
    )


def main(*capabilities: str) -> None:
    """Compile all kernels, the main one for decode and for prefill of each layer."""
    compiled = {}
    wide = LAYERS["256"]
    dims = {name: wide[name] for name in ("KEY_DIM", "VALUE_DIM", "KEY_PAD", "VALUE_PAD")}
    merge = {"HEADS": 16, "VALUE_DIM": 256, "VALUE_PAD": 256, "NUM_SPLITS": 32}
    for capability in map(int, capabilities):
        card = f"sm_{capability}"
        compiled[f"{card} write_kv"] = _compile(
            triton_kernels.write_kv_kernel, capability, 1, BLOCK_SIZE=16, **dims
        )
        compiled[f"{card} merge"] = _compile(
            triton_kernels.merge_kernel, capability, num_warps(32, 256), **merge
        )
        for name, layer in LAYERS.items():
            for kind in ("decode", "prefill"):
                compiled[f"{card} {kind} {name}"] = _attend(capability, layer, is_decode=kind == "decode")
    json.dump(compiled, sys.stdout)


if __name__ == "__main__":
    main(*sys.argv[1:])

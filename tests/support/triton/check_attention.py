"""Run the Triton back end in Triton's interpreter; to be run as a program, in a fresh process.

``python -m support.triton.check_attention some|float16`` computes all problems in float32 and those
with everything in float16, or all in float16. The first has splits in float32 alone.

TRITON_INTERPRET=1 must be set before Triton is imported, which in a test process it may long be.
Prints one JSON object: problem name -> largest error against the float64 oracle.
"""

import json
import sys
from dataclasses import replace
from unittest import mock

import torch
from corun.gpu.attention import triton_backend
from support.attention import Problem, dense_oracle, make_call

DECODE = Problem((1, 1, 1), (5, 16, 37))
PREFILL = Problem((7, 33), (7, 33))
CHUNK = Problem((9, 20), (40, 41))
MIXED = Problem((1, 20, 1, 2), (17, 50, 1, 16))

PROBLEMS = {
    "decode": DECODE,
    "decode-gqa-1": replace(DECODE, heads=2),
    "decode-gqa-7": replace(DECODE, heads=14),
    "decode-blocks-of-5": replace(DECODE, block_size=5),
    "decode-window": replace(DECODE, sliding_window=10),
    "decode-everything": replace(DECODE, sliding_window=21, softcap=5.0, with_sinks=True, heads=14),
    "prefill": PREFILL,
    "prefill-softcap": replace(PREFILL, softcap=2.0),
    "prefill-sinks": replace(PREFILL, with_sinks=True, heads=6),
    "prefill-wide": replace(PREFILL, key_dim=256, value_dim=256),
    "chunk": replace(CHUNK, heads=8),
    "chunk-behind-tiles": Problem((9, 20), (140, 141), heads=8),
    "chunk-window": replace(CHUNK, sliding_window=10),
    "chunk-window-larger": replace(CHUNK, sliding_window=100),
    "chunk-odd-dims": replace(CHUNK, key_dim=20, value_dim=7),
    "chunk-key-wider": replace(CHUNK, key_dim=48, value_dim=32),
    "mixed": MIXED,
    "mixed-everything": replace(MIXED, sliding_window=12, softcap=5.0, with_sinks=True, heads=14),
}
IN_FLOAT16 = (
    "decode-everything",
    "prefill-wide",
    "chunk-behind-tiles",
    "chunk-key-wider",
    "mixed-everything",
)
# Contexts long enough to be split once splits may be small.
SPLITS = {
    "splits": Problem((1, 1), (257, 40)),
    "splits-one-empty": Problem((1, 1, 1), (5, 300, 64)),
    "splits-window": Problem((1,), (200,), sliding_window=70),
    "splits-mixed": Problem((1, 9, 1), (257, 90, 5), heads=14),
    "splits-sinks": Problem((1, 1), (130, 3), with_sinks=True, heads=14),
}


def _error(problem: Problem, dtype: torch.dtype, *, is_strided: bool = False) -> float:
    call = make_call(replace(problem, dtype=dtype))
    if is_strided:  # in the last dimension, which the kernels do not ask about
        call.query, call.key, call.value = (
            part.transpose(1, 2).contiguous().transpose(1, 2) for part in (call.query, call.key, call.value)
        )
    attended = triton_backend.TritonAttention().forward(*call.arguments())
    assert attended.dtype == dtype
    return float((attended.double() - dense_oracle(call)).abs().max())


def main(what: str) -> None:
    assert triton_backend.TritonAttention().is_interpreted
    torch.use_deterministic_algorithms(mode=True)  # new memory has NaN
    some = {torch.float32: tuple(PROBLEMS), torch.float16: IN_FLOAT16}
    errors = {}
    for dtype, names in (some if what == "some" else {torch.float16: tuple(PROBLEMS)}).items():
        for name in names:
            errors[f"{name}-{dtype}"] = _error(PROBLEMS[name], dtype)
        errors[f"strided-{dtype}"] = _error(MIXED, dtype, is_strided=True)
        if what == "some" and dtype == torch.float16:
            continue  # its splits are float32's
        with mock.patch.object(triton_backend, "_MIN_SPLIT_TOKENS", 32):
            for name, problem in SPLITS.items():
                errors[f"{name}-{dtype}"] = _error(problem, dtype)
    json.dump(errors, sys.stdout)


if __name__ == "__main__":
    main(*sys.argv[1:])

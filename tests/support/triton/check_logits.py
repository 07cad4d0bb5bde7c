"""Runs the Triton kernels of the sampler in a process of its own.

Either ``interpret``, or ``compile CAPABILITY...``.
"""

import sys
from typing import Any

import numpy as np
import torch
from corun.gpu.execution.draws import Draws, RandomRows
from corun.gpu.execution.request_table import RequestState
from corun.runtime.plan import BASE_ADAPTER, NewRequest, RequestId
from corun.runtime.sampling import SamplingParams
from support.logits import LogitCase
from support.triton.program import spilled_bytes

_POINTERS = {"logits": "*fp32", "masks": "*i32", "mask_rows": "*i32", "entries": "*i32"}
_DRAW_POINTERS = {
    "tokens": "*i64",
    "probs": "*fp32",
    "is_complete": "*i1",
    "numbers": "*fp64",
    "min_p": "*fp32",
    "top_k": "*i64",
    "top_p": "*fp64",
    "has_limit": "*i1",
}
# The first one is complete.
_CUTS: list[dict[str, Any]] = [
    {"top_k": 1},
    {"top_p": 0.9},
    {"top_p": 0.999, "top_k": 140},
    {"top_p": 0.2},
    {"top_k": 290},
    {"min_p": 0.02},
    {"min_p": 0.001, "top_p": 0.7, "top_k": 130},
    {"min_p": 1.0},
]


def interpret() -> None:
    """Compare with the definition, and draws with those of a CPU."""
    _check_draws(_CUTS[::2], 300, spread=0.0)  # each kind of cut
    _check_draws(_CUTS, 300, spread=1.0, num_forbidden=150)
    _check_draws(_CUTS[:3], 2100, spread=0.5)
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


def _check_draws(
    cuts: list[dict[str, Any]], num_columns: int, *, spread: float, num_forbidden: int = 0
) -> None:
    """Logits have few values, so many are equal; the last ones have no probability."""
    from corun.gpu.execution.triton_kernels import draw_rest_on_cuda

    params = [SamplingParams(seed=seed, **cut) for seed, cut in enumerate(cuts)]
    states = [
        RequestState(NewRequest(RequestId(n), (5,), one, BASE_ADAPTER), 0, 100)
        for n, one in enumerate(params)
    ]
    rng = np.random.default_rng(1)
    values = torch.from_numpy(rng.standard_normal((len(states), num_columns)).astype(np.float32) * spread)
    logits = values.bfloat16().float()
    logits[:, num_columns - num_forbidden :] = float("-inf")
    random = RandomRows.of(states)
    assert random is not None
    sent = {name: torch.from_numpy(array) for name, array in random.arrays.items()}
    probs = torch.softmax(logits - logits.amax(dim=-1, keepdim=True), dim=-1)
    largest = logits.max(dim=-1)
    draws = Draws(random, sent, logits, (largest.values, largest.indices))
    assert draws.is_complete is not None
    draws.complete(draws.is_complete.tolist(), ())
    cut = [sent[name] for name in ("numbers", "min_p", "top_k", "top_p", "has_limit")]
    is_complete = torch.arange(len(states)) == 0
    drawn = torch.full_like(draws.tokens, -1)
    draw_rest_on_cuda(drawn, probs, is_complete, cut)
    assert drawn[0] == -1  # it stays as it is
    assert torch.equal(drawn[1:], draws.tokens[1:]), (spread, drawn.tolist(), draws.tokens.tolist())


def compile_for(*capabilities: str) -> None:
    """Compile to machine code, without a device and without spilled registers."""
    import triton
    from corun.gpu.execution.triton_kernels import adjust_logits_kernel, draw_rest_kernel
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    for kernel, pointers, aligned, options in (
        (adjust_logits_kernel, _POINTERS, _POINTERS, {}),
        (draw_rest_kernel, _DRAW_POINTERS, {}, {"num_warps": 8}),
    ):
        names = kernel.arg_names
        source = ASTSource(
            fn=kernel,
            signature={n: "constexpr" if n == "BLOCK" else pointers.get(n, "i32") for n in names},
            constexprs={(names.index("BLOCK"),): 1024},
            attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
        )
        for capability in map(int, capabilities):
            target = GPUTarget("cuda", capability, 32)
            compiled = triton.compile(source, target=target, options=options)
            assert spilled_bytes(compiled.asm["cubin"]) == 0, (kernel.__name__, capability)


if __name__ == "__main__":
    {"interpret": interpret, "compile": compile_for}[sys.argv[1]](*sys.argv[2:])

"""Particularities of the numba back end: other arithmetic, long contexts, equal cuts of work."""

from dataclasses import replace
from typing import Any

import numba
import pytest
import torch
from corun.cpu_workers.kernels.simd.layout import BFLOAT16
from corun.gpu.attention.numba_backend import NumbaAttention
from support.attention import Call, Problem, dense_oracle, make_call

_BFLOAT16_TOLERANCE = 1.6e-2
_FLOAT32_TOLERANCE = 1e-5


@pytest.mark.parametrize(
    "settings",
    [
        {"heads": 2, "kv_heads": 2},
        {"heads": 4, "kv_heads": 2, "key_dim": 20, "value_dim": 7},
        {"heads": 14, "kv_heads": 2, "sliding_window": 21, "softcap": 5.0, "with_sinks": True},
    ],
)
def test_bfloat16_without_products_of_pairs(settings: dict[str, Any]) -> None:
    backend = NumbaAttention(tag=BFLOAT16)
    for query_lens, context_lens in (((1, 1, 1), (1, 17, 61)), ((9, 1, 33), (40, 17, 33))):
        call = make_call(Problem(query_lens, context_lens, dtype=torch.bfloat16, **settings))
        attended = backend.forward(*call.arguments())
        error = (attended.double() - dense_oracle(call)).abs().max().item()
        assert error < _BFLOAT16_TOLERANCE


@pytest.mark.parametrize(
    "settings", [{}, {"sliding_window": 700, "with_sinks": True}, {"block_size": 5, "heads": 14}]
)
@pytest.mark.parametrize("query_lens", [(1, 1, 1), (70, 1, 200)])
def test_contexts_longer_than_a_segment(query_lens: tuple[int, ...], settings: dict[str, Any]) -> None:
    call = make_call(Problem(query_lens, (1500, 513, 1024), **settings))
    attended = NumbaAttention().forward(*call.arguments())
    assert (attended.double() - dense_oracle(call)).abs().max().item() < _FLOAT32_TOLERANCE


def _row_alone(call: Call, row: int) -> Call:
    """The same blocks, attended by one row of the call."""
    metadata = call.metadata
    start, end = metadata.query_starts_host[row : row + 2]
    context_len = metadata.context_lens_host[row]
    alone = replace(
        metadata,
        query_starts=torch.tensor([0, end - start], dtype=torch.int32),
        context_lens=metadata.context_lens[row : row + 1],
        block_tables=metadata.block_tables[row : row + 1],
        slot_mapping=metadata.slot_mapping[start:end],
        query_starts_host=(0, end - start),
        context_lens_host=(context_len,),
        max_query_len=end - start,
        max_context_len=context_len,
    )
    tensors = {name: getattr(call, name)[start:end] for name in ("query", "key", "value")}
    return replace(call, metadata=alone, **tensors)


@pytest.mark.parametrize("num_threads", [1, 2])
def test_neighbours_do_not_change_a_bit_of_a_row(num_threads: int) -> None:
    before = numba.get_num_threads()
    if num_threads > numba.config.NUMBA_NUM_THREADS:
        pytest.skip("the machine has fewer processors")
    call = make_call(Problem((1, 40, 1, 3), (1100, 900, 600, 30), heads=8))
    together = NumbaAttention().forward(*call.arguments())
    numba.set_num_threads(num_threads)
    try:
        for row in range(4):
            start, end = call.metadata.query_starts_host[row : row + 2]
            alone = NumbaAttention().forward(*_row_alone(call, row).arguments())
            assert torch.equal(alone, together[start:end]), row
    finally:
        numba.set_num_threads(before)


def test_cutting_a_prompt_into_chunks_does_not_change_a_bit() -> None:
    whole = make_call(Problem((150,), (150,), heads=8))
    expected = NumbaAttention().forward(*whole.arguments())
    backend, parts = NumbaAttention(), []
    for start, end in ((0, 70), (70, 150)):
        metadata = replace(
            whole.metadata,
            query_starts=torch.tensor([0, end - start], dtype=torch.int32),
            context_lens=torch.tensor([end], dtype=torch.int32),
            slot_mapping=whole.metadata.slot_mapping[start:end],
            query_starts_host=(0, end - start),
            context_lens_host=(end,),
            max_query_len=end - start,
            max_context_len=end,
        )
        tensors = {name: getattr(whole, name)[start:end] for name in ("query", "key", "value")}
        parts.append(backend.forward(*replace(whole, metadata=metadata, **tensors).arguments()))
    assert torch.equal(torch.cat(parts), expected)

"""Every attention back end against a float64 loop over rows and heads."""

from typing import Any

import pytest
import torch
from corun.gpu.attention.base import AttentionBackend, AttentionParams
from corun.gpu.attention.numba_backend import NumbaAttention
from corun.gpu.attention.torch_backend import TorchAttention
from support.attention import Problem, dense_oracle, make_call

DTYPES = {
    "torch": (torch.float32, torch.bfloat16, torch.float16, torch.float64),
    "numba": (torch.float32, torch.bfloat16),
}
# Largest error of an element; values are standard normal. In the half types the inputs are exact
# and the error is that of rounding weights and results once: half a unit in the last place of
# numbers up to 4.
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
BACKENDS = [(name, dtype) for name, dtypes in DTYPES.items() for dtype in dtypes]

# name -> (query lengths, context lengths); the block size is 16 unless a problem says otherwise
ROWS = {
    "decode": ((1, 1, 1, 1, 1, 1), (1, 15, 16, 17, 32, 61)),
    "prefill": ((7, 33, 16), (7, 33, 16)),
    "chunk": ((9, 5, 16), (40, 6, 48)),
    "mixed": ((1, 20, 1, 2), (17, 50, 1, 16)),
}
VARIANTS: dict[str, dict[str, Any]] = {
    "gqa-1": {"heads": 2, "kv_heads": 2},
    "gqa-2": {"heads": 4, "kv_heads": 2},
    "gqa-4": {"heads": 8, "kv_heads": 2},
    "gqa-7": {"heads": 14, "kv_heads": 2},
    "mqa": {"heads": 3, "kv_heads": 1},
    "window-smaller": {"sliding_window": 10},
    "window-of-one": {"sliding_window": 1},
    "window-larger": {"sliding_window": 100},
    "softcap": {"softcap": 2.0},
    "large-softcap": {"softcap": 50.0},
    "sinks": {"with_sinks": True},
    "everything": {"sliding_window": 21, "softcap": 5.0, "with_sinks": True, "heads": 14},
    "odd-dims": {"key_dim": 20, "value_dim": 7},
    "key-wider": {"key_dim": 48, "value_dim": 32},
    "dim-96": {"key_dim": 96, "value_dim": 96},
    "blocks-of-8": {"block_size": 8},
    "blocks-of-5": {"block_size": 5},
    "blocks-of-32": {"block_size": 32},
}


def make_backend(name: str) -> AttentionBackend:
    return NumbaAttention() if name == "numba" else TorchAttention()


@pytest.fixture(scope="module")
def backends() -> dict[str, AttentionBackend]:
    return {name: make_backend(name) for name in DTYPES}


def check(
    backends: dict[str, AttentionBackend], rows: str, variant: str, dtypes: tuple[torch.dtype, ...]
) -> None:
    query_lens, context_lens = ROWS[rows]
    for name, dtype in BACKENDS:
        if dtype not in dtypes:
            continue
        call = make_call(Problem(query_lens, context_lens, dtype=dtype, **VARIANTS[variant]))
        attended = backends[name].forward(*call.arguments())
        assert attended.dtype == dtype
        assert attended.is_contiguous()
        error = (attended.double() - dense_oracle(call)).abs().max().item()
        # Written so that NaN fails.
        assert error < TOLERANCES[dtype], (name, dtype, error)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("rows", ROWS)
def test_equals_the_dense_oracle(backends: dict[str, AttentionBackend], rows: str, variant: str) -> None:
    check(backends, rows, variant, (torch.float32, torch.bfloat16))


@pytest.mark.parametrize(
    "variant", [one if one == "everything" else pytest.param(one, marks=pytest.mark.full) for one in VARIANTS]
)
@pytest.mark.parametrize("rows", ROWS)
def test_other_types_equal_the_dense_oracle(
    backends: dict[str, AttentionBackend], rows: str, variant: str
) -> None:
    """Of torch, in which the type changes no branch of the back end."""
    check(backends, rows, variant, (torch.float16, torch.float64))


@pytest.mark.parametrize("name", DTYPES)
def test_writes_keys_and_values_to_their_slots_and_nowhere_else(
    backends: dict[str, AttentionBackend], name: str
) -> None:
    call = make_call(Problem((3, 1), (18, 5), value_dim=24, dtype=torch.bfloat16))
    expected_keys, expected_values = call.key_blocks.clone(), call.value_blocks.clone()
    for token, slot in enumerate(call.metadata.slot_mapping.tolist()):
        expected_keys[slot // 16, :, slot % 16] = call.key[token]
        expected_values[slot // 16, :, slot % 16] = call.value[token]
    backends[name].forward(*call.arguments())
    assert torch.equal(call.key_blocks.nan_to_num(7.0), expected_keys.nan_to_num(7.0))
    assert torch.equal(call.value_blocks.nan_to_num(7.0), expected_values.nan_to_num(7.0))


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("query_len", [1, 24])
def test_a_row_with_nan_poisons_only_itself(
    backends: dict[str, AttentionBackend], name: str, query_len: int
) -> None:
    call = make_call(Problem((query_len, query_len), (30, 41)))
    call.key[0, 0, 0] = torch.nan
    attended = backends[name].forward(*call.arguments())
    assert attended[query_len - 1].isnan().any()
    error = (attended.double() - dense_oracle(call))[query_len:].abs().max().item()
    assert error < TOLERANCES[torch.float32]


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("query_len", [1, 24])
@pytest.mark.parametrize("factor", [1e-30, 30.0, 1e4])
def test_flat_and_peaked_scores(
    backends: dict[str, AttentionBackend], name: str, factor: float, query_len: int
) -> None:
    call = make_call(Problem((query_len, query_len), (130, 64)))
    call.query *= factor
    attended = backends[name].forward(*call.arguments())
    # Rounding of a score of size s moves its weight by s * 2**-24.
    tolerance = TOLERANCES[torch.float32] * max(1.0, factor)
    assert (attended.double() - dense_oracle(call)).abs().max().item() < tolerance


@pytest.mark.parametrize("name", DTYPES)
def test_layers_of_one_pass_share_metadata_but_not_parameters(
    backends: dict[str, AttentionBackend], name: str
) -> None:
    call = make_call(Problem((1, 20, 9), (17, 50, 9)))
    scaling = call.params.scaling
    for window in (None, 12, 30, None):
        call.params = AttentionParams(scaling, sliding_window=window)
        error = (backends[name].forward(*call.arguments()).double() - dense_oracle(call)).abs().max()
        assert error.item() < TOLERANCES[torch.float32]

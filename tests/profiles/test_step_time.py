"""The time of a step, against closed forms."""

import random
from dataclasses import replace

import pytest
from corun.profiles.curve import Curve
from corun.profiles.models import LoraModel, MachineModel
from corun.profiles.step_time import NO_ROWS, forward_s, num_keys, pass_s, row_costs
from support.profiles import PROFILE

_BYTES_PER_RANK = 96 * 2**20 // 64

# 12 ms + max(23 ms, prefill); prefill 0.20 ms per token + 1.2 us per token and rank + 7 ns per
# token and key; decode rows 1 us per key, 4 us per rank; 0.05 ms per row.
_HAND_SET = replace(
    PROFILE.model,
    step_s=Curve((0.0, 1.0), (0.0, 2e-4)),
    lora=LoraModel(
        decode_s_per_byte=4e-6 / _BYTES_PER_RANK,
        decode_fixed_s=0.0,
        prefill_s_per_token_byte=1.2e-6 / _BYTES_PER_RANK,
        prefill_fixed_s=0.0,
    ),
    host_step_s=0.012,
    host_row_s=5e-5,
    prefill_s_per_token_key=7e-9,
    decode_s_per_key=1e-6,
    read_s=0.023,
    decode_token_share=0.0,
)


def _forward_s(model: MachineModel, rows: list[tuple[int, int, int]]) -> float:
    """``rows``: tokens, start position and rank of each."""
    return forward_s(
        model,
        [tokens for tokens, _, _ in rows],
        [start for _, start, _ in rows],
        [rank * _BYTES_PER_RANK for _, _, rank in rows],
    )


def _hand_set_s(rows: list[tuple[int, int, int]]) -> float:
    """The same as it is written down, with every key counted."""
    prefill_s = decode_s = 0.0
    for tokens, start, rank in rows:
        keys = sum(position + 1 for position in range(start, start + tokens))
        if tokens > 1:
            prefill_s += 2e-4 * tokens + 1.2e-6 * tokens * rank + 7e-9 * keys
        else:
            decode_s += 1e-6 * keys + 4e-6 * rank
    return 0.012 + max(0.023, prefill_s) + decode_s + 5e-5 * len(rows)


@pytest.mark.parametrize(
    "rows",
    [
        [(1, 0, 0)],
        [(1, 2047, 64)],
        [(512, 0, 8)],
        [(512, 1536, 128), (1, 99, 0)],
        [(2, 7, 64), (1, 5, 64), (1, 6, 0), (100, 0, 0)],  # hides under reading the weights
        [(1, position, 8) for position in range(0, 1000, 25)],
    ],
)
def test_a_machine_set_by_hand_is_met_exactly(rows: list[tuple[int, int, int]]) -> None:
    assert _forward_s(_HAND_SET, rows) == pytest.approx(_hand_set_s(rows), rel=1e-12)


def test_random_steps_meet_it_in_any_order_of_rows() -> None:
    rng = random.Random(0)
    for _ in range(200):
        rows = [
            (rng.choice((1, 1, 1, rng.randint(1, 512))), rng.randint(0, 2048), rng.choice((0, 64)))
            for _ in range(rng.randint(1, 40))
        ]
        expected_s = pytest.approx(_hand_set_s(rows), rel=1e-9)
        assert _forward_s(_HAND_SET, rows) == expected_s
        assert _forward_s(_HAND_SET, rows[::-1]) == expected_s


def test_without_the_new_terms_a_step_is_the_curve_and_the_adapters() -> None:
    model = replace(
        PROFILE.model,
        host_step_s=0.0,
        decode_step_s=None,
        host_row_s=0.0,
        prefill_s_per_token_key=0.0,
        decode_s_per_key=0.0,
    )
    assert forward_s(model, [], [], []) == 0.0
    assert forward_s(model, [63, 1], [0, 9], [10**6, 10**6]) == pytest.approx(
        model.step_s.at(64) + model.lora.prefill_s(63, 10**6) + model.lora.decode_s([10**6])
    )
    assert forward_s(model, [1] * 8, [9] * 8, [10**6] * 8) == pytest.approx(
        model.step_s.at(8) + model.lora.decode_s([10**6] * 8)
    )


def test_a_pass_in_which_all_decode_may_have_a_curve_of_its_own() -> None:
    model = replace(_HAND_SET, read_s=0.0, decode_step_s=Curve((1.0, 2.0), (0.01, 0.015)))
    assert forward_s(model, [1, 1], [4, 0], [0, 0]) == pytest.approx(0.012 + 0.015 + 1e-4 + 6e-6)
    mixed = [1, 2], [4, 0], [0, 0]
    assert forward_s(model, *mixed) == forward_s(replace(model, decode_step_s=None), *mixed)


def test_rows_of_several_origins_make_one_pass() -> None:
    rows = [(40, 8, 64), (1, 3, 8), (1, 9, 0), (2, 2, 0)]
    columns = [[row[index] for row in rows] for index in range(3)]
    parts = [row_costs(_HAND_SET, [n], [start], [size]) for n, start, size in rows]
    whole = row_costs(_HAND_SET, *columns)
    joined = NO_ROWS.plus(*parts)
    assert (joined.num_prefill_tokens, joined.num_decodes, joined.decode_bytes) == (42, 2, 8)
    assert pass_s(_HAND_SET, joined) == pytest.approx(pass_s(_HAND_SET, whole))
    assert forward_s(_HAND_SET, *columns) == pytest.approx(0.012 + pass_s(_HAND_SET, whole))


def test_padded_kernels_take_every_row_as_if_its_adapter_were_the_largest() -> None:
    lora = replace(_HAND_SET.lora, prefill_s_per_token=1e-6, prefill_fixed_s=1e-3, is_padded=True)
    padded = replace(_HAND_SET, lora=lora, read_s=0.0, decode_step_s=None)
    rows = [(40, 8, 0), (1, 3, 8), (1, 9, 64), (2, 2, 16)]
    without = _forward_s(padded, [(tokens, start, 0) for tokens, start, _ in rows])
    adapters_s = 42 * (64 * 1.2e-6 + 1e-6) + 1e-3 + 2 * 64 * 4e-6
    assert _forward_s(padded, rows) == pytest.approx(without + adapters_s)
    assert _forward_s(padded, rows[::-1]) == pytest.approx(without + adapters_s)
    decodes = [(1, 5, 8)] * 31
    alone = _forward_s(padded, decodes)
    grown = _forward_s(padded, [*decodes, (1, 5, 128)])
    assert grown - alone == pytest.approx(5e-5 + 6e-6 + 4e-6 * (32 * 128 - 31 * 8))


def test_padded_rows_of_several_origins_make_one_pass() -> None:
    padded = replace(_HAND_SET, lora=replace(_HAND_SET.lora, is_padded=True))
    rows = [(40, 8, 10**6), (1, 3, 10**7), (1, 9, 0), (2, 2, 0)]
    columns = [[row[index] for row in rows] for index in range(3)]
    parts = [row_costs(padded, [n], [start], [size]) for n, start, size in rows]
    joined, whole = NO_ROWS.plus(*parts), row_costs(padded, *columns)
    assert joined.largest_bytes == whole.largest_bytes == 10**7
    assert pass_s(padded, joined) == pytest.approx(pass_s(padded, whole))


def test_keys_are_counted_one_by_one() -> None:
    assert [num_keys(1, 0), num_keys(1, 9), num_keys(3, 0), num_keys(2, 10)] == [1, 10, 6, 23]


def test_rows_that_decode_beside_a_cold_one_are_not_captured() -> None:
    model = replace(
        _HAND_SET,
        step_s=Curve((1.0, 8.0), (0.04, 0.05)),
        decode_step_s=Curve((1.0,), (0.03,)),
        decode_token_share=1.0,
        read_s=0.0,
    )
    decodes = row_costs(model, (1, 1), (0, 0), (0, 0))
    more_s = pass_s(model, decodes, may_capture=False) - pass_s(model, decodes)
    assert more_s == pytest.approx(0.04 + 0.01 / 7 - 0.03)
    slow = replace(model, decode_step_s=Curve((1.0,), (0.06,)))  # as where times are noisy
    assert pass_s(slow, decodes, may_capture=False) == pass_s(slow, decodes)
    mixed = row_costs(model, (1, 4), (0, 0), (0, 0))
    assert pass_s(model, mixed, may_capture=False) == pass_s(model, mixed)

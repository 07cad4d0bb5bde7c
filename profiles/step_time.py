"""How long a step takes, from its rows: for the planner and for simulations. Pure.

All times are seconds.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from .models import MachineModel


@dataclass(frozen=True, slots=True)
class RowCosts:
    """What rows add to a forward pass, apart from each other."""

    curve_tokens: float = 0.0  # of the base model's curve
    prefill_s: float = 0.0  # adapters and attention of prefill rows
    other_s: float = 0.0  # decode rows' adapters and keys, and the host's work on every row


def forward_s(
    model: MachineModel,
    num_tokens: Sequence[int],
    start_positions: Sequence[int],
    adapter_bytes: Sequence[int],
) -> float:
    """A step of one forward pass whose adapters are all on the device.

    host_step_s + host_row_s * rows + max(read_s, prefill) + decode, where prefill is the curve
    ``step_s`` with the adapters and the attention of prefill rows. A row of one token decodes.
    Each token looks at itself and at all before it: see ``num_keys``. 0 without rows.

    Args:
        model: Of the machine.
        num_tokens: To compute, of each row, at least 1.
        start_positions: Of each row's first token: how many tokens are computed already.
        adapter_bytes: Of each row's adapter; 0 = the base model.
    """
    if not num_tokens:
        return 0.0
    return model.host_step_s + pass_s(
        model, row_costs(model, num_tokens, start_positions, adapter_bytes)
    )


def pass_s(model: MachineModel, costs: RowCosts) -> float:
    """The forward pass of such rows, without ``host_step_s``, which a step has but once."""
    arithmetic_s = model.step_s.at(costs.curve_tokens) + costs.prefill_s
    return max(model.read_s, arithmetic_s) + costs.other_s


def row_costs(
    model: MachineModel,
    num_tokens: Sequence[int],
    start_positions: Sequence[int],
    adapter_bytes: Sequence[int],
) -> RowCosts:
    """See ``forward_s``. O(rows), and little more than sums where all rows decode."""
    num_rows = len(num_tokens)
    host_s = model.host_row_s * num_rows
    if sum(num_tokens) == num_rows:
        keys_s = model.decode_s_per_key * (sum(start_positions) + num_rows)
        lora_s = model.lora.decode_s(adapter_bytes)
        return RowCosts(model.decode_token_share * num_rows, 0.0, host_s + keys_s + lora_s)
    lora = model.lora
    decode_bytes = []
    decode_keys = prefill_keys = prefill_tokens = 0
    prefill_s = 0.0
    for tokens, start, num_bytes in zip(num_tokens, start_positions, adapter_bytes, strict=True):
        if tokens == 1:
            decode_keys += start + 1
            decode_bytes.append(num_bytes)
            continue
        prefill_tokens += tokens
        prefill_keys += num_keys(tokens, start)
        if num_bytes:
            prefill_s += lora.prefill_s(tokens, num_bytes)
    return RowCosts(
        prefill_tokens + model.decode_token_share * len(decode_bytes),
        prefill_s + model.prefill_s_per_token_key * prefill_keys,
        host_s + model.decode_s_per_key * decode_keys + lora.decode_s(decode_bytes),
    )


def num_keys(num_tokens: int, start_position: int) -> int:
    """Pairs of a token and a key that it looks at, of a row's next ``num_tokens``."""
    return num_tokens * start_position + num_tokens * (num_tokens + 1) // 2

"""Predicts the duration of a step from its rows, for the planner and for simulations. Pure.

All times are seconds.
"""

from collections.abc import Sequence
from typing import NamedTuple

from .models import MachineModel


class RowCosts(NamedTuple):
    """Costs of rows in a forward pass; for several rows the sums, and the largest adapter."""

    num_prefill_tokens: int = 0
    num_decodes: int = 0
    decode_bytes: int = 0  # of the decode rows' adapters
    prefill_s: float = 0.0  # attention of prefill rows; with exact kernels their adapters, too
    other_s: float = 0.0  # attention of decode rows, and the host's work on every row
    largest_bytes: int = 0  # with padded kernels: of the largest adapter of all rows

    def plus(self, *others: "RowCosts") -> "RowCosts":
        """The costs of all in one pass."""
        all_costs = (self, *others)
        return RowCosts(
            sum([costs.num_prefill_tokens for costs in all_costs]),
            sum([costs.num_decodes for costs in all_costs]),
            sum([costs.decode_bytes for costs in all_costs]),
            sum([costs.prefill_s for costs in all_costs]),
            sum([costs.other_s for costs in all_costs]),
            max([costs.largest_bytes for costs in all_costs]),
        )


NO_ROWS = RowCosts()


def forward_s(
    model: MachineModel,
    num_tokens: Sequence[int],
    start_positions: Sequence[int],
    adapter_bytes: Sequence[int],
) -> float:
    """Duration of a step of one forward pass, with all adapters on the device.

    host_step_s + host_row_s * rows + max(read_s, prefill) + decode, where prefill is the curve
    ``step_s`` with the adapters and the attention of prefill rows. A row of one token decodes.
    Each token attends to itself and to all before it: see ``num_keys``. The cost of adapters
    depends on the kernels' form: see ``LoraModel``. 0 without rows.

    Args:
        model: The model of the machine.
        num_tokens: To compute, of each row, at least 1.
        start_positions: Of each row's first token: the number of tokens computed before.
        adapter_bytes: Of each row's adapter; 0 = the base model.
    """
    if not num_tokens:
        return 0.0
    costs = row_costs(model, num_tokens, start_positions, adapter_bytes)
    return model.host_step_s + pass_s(model, costs)


def pass_s(model: MachineModel, costs: RowCosts, *, may_capture: bool = True) -> float:
    """Duration of a forward pass, without ``host_step_s``, which a step has only once.

    ``may_capture``: whether a pass of decode rows is captured; it is not if a row is cold.
    """
    products_s = 0.0
    if not costs.num_prefill_tokens and model.decode_step_s is not None:
        products_s = model.decode_step_s.at(costs.num_decodes)
    if not products_s or not may_capture:  # a captured pass never takes longer
        num_decode_tokens = model.decode_token_share * costs.num_decodes
        modules_s = model.step_s.at(costs.num_prefill_tokens + num_decode_tokens)
        products_s = max(products_s, modules_s)
    lora, prefill_s, decode_bytes = model.lora, costs.prefill_s, costs.decode_bytes
    if lora.is_padded:
        prefill_s += lora.prefill_s(costs.num_prefill_tokens, costs.largest_bytes)
        decode_bytes = costs.num_decodes * costs.largest_bytes
    lora_s = lora.decode_s((decode_bytes,))
    return max(model.read_s, products_s + prefill_s) + lora_s + costs.other_s


def row_costs(
    model: MachineModel,
    num_tokens: Sequence[int],
    start_positions: Sequence[int],
    adapter_bytes: Sequence[int],
) -> RowCosts:
    """See ``forward_s``. O(rows), and little more than sums where all rows decode."""
    num_rows = len(num_tokens)
    host_s = model.host_row_s * num_rows
    largest_bytes = max(adapter_bytes, default=0) if model.lora.is_padded else 0
    if sum(num_tokens) == num_rows:
        keys_s = model.decode_s_per_key * (sum(start_positions) + num_rows)
        return RowCosts(0, num_rows, sum(adapter_bytes), 0.0, host_s + keys_s, largest_bytes)
    prefill_tokens = prefill_keys = decodes = decode_keys = decode_bytes = 0
    prefill_s = 0.0
    for tokens, start, num_bytes in zip(num_tokens, start_positions, adapter_bytes, strict=True):
        if tokens == 1:
            decodes += 1
            decode_keys += start + 1
            decode_bytes += num_bytes
            continue
        prefill_tokens += tokens
        prefill_keys += num_keys(tokens, start)
        if not model.lora.is_padded:
            prefill_s += model.lora.prefill_s(tokens, num_bytes)
    prefill_s += model.prefill_s_per_token_key * prefill_keys
    other_s = host_s + model.decode_s_per_key * decode_keys
    return RowCosts(prefill_tokens, decodes, decode_bytes, prefill_s, other_s, largest_bytes)


def num_keys(num_tokens: int, start_position: int) -> int:
    """Pairs of a token and a key that it attends to, for a row's next ``num_tokens``."""
    return num_tokens * start_position + num_tokens * (num_tokens + 1) // 2

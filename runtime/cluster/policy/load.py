"""The load of a server, from its last report and the requests sent since. For routers' scores.

The model: a server computes in steps, each with all decoding rows and, while prompts wait, a chunk.
All times are seconds.
"""

from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

from ....profiles.step_time import RowCosts, pass_s
from .reports import RouteRequest, ServerCosts, ServerReport

# A server that has just started, or is stuck, may report any ratio: scores stay finite.
_MIN_CORRECTION, _MAX_CORRECTION = 0.05, 1000.0


Value = TypeVar("Value")  # a number, or an array with one cell per server


class ServerLoad(NamedTuple, Generic[Value]):
    """The load of one server, or of many. Times are modelled and corrected by measurements."""

    num_requests: Value
    num_rows: Value  # that decode at once, after all prefills
    largest_bytes: Value  # the largest adapter of these rows
    step_s: Value  # time of a step in which all rows decode
    row_s: Value  # added by one more row of the base model
    chunk_step_s: Value  # time of a step with a chunk, without the chunk
    busy_until_s: Value  # until all queued tokens are computed
    queued_tokens: Value
    free_kv_tokens: Value  # after all queued tokens have theirs; may be negative
    context_tokens: Value
    correction: Value  # measured / modelled
    decode_s_per_byte: Value  # per byte of each row's adapter; padded: of the largest
    # Added to chunks per token and byte of an adapter larger than theirs; 0 if kernels do not pad.
    padded_s_per_token_byte: Value
    # Wait for a row of the batch, and for each missing token of KV, per token of the mean output:
    # of n rows, n / mean output end in a step, each with its share of the context.
    row_wait_s: Value
    kv_wait_s: Value


class _Rows(NamedTuple):
    """The requests that decode in one step."""

    number: int
    adapter_bytes: float
    largest_bytes: int
    context_tokens: float


def load_of(
    costs: ServerCosts, report: ServerReport, sent: Sequence[tuple[float, RouteRequest]]
) -> ServerLoad[float]:
    """Return the load of ``report`` plus ``sent``: requests since, with times.

    O(ranks + sent).
    """
    queued_tokens = report.queued_prefill_tokens
    for _, request in sent:
        queued_tokens += request.num_prompt_tokens
    context_tokens = report.running_context_tokens + queued_tokens
    num_requests, rows = _rows(costs, report, sent, context_tokens)
    step_s = _decode_step_s(costs, rows, rows.number)
    row_s = _decode_step_s(costs, rows, rows.number + 1) - step_s
    chunk_step_s = step_s
    if not costs.mix_decode_with_prefill:
        model = costs.model
        chunk_step_s = model.host_step_s + model.turn_s + max(model.read_s, model.step_s.at(0))
    correction = min(max(_MIN_CORRECTION, report.measured_over_predicted), _MAX_CORRECTION)
    mean_bytes = rows.adapter_bytes / rows.number if rows.number else 0.0
    chunk_s = chunk_step_s + _chunk_s(costs, costs.max_num_batched_tokens, mean_bytes)
    token_s = correction * chunk_s / costs.max_num_batched_tokens
    lora = costs.model.lora
    num_too_many = max(num_requests + 1 - costs.max_num_seqs, 0)
    busy_until_s = report.reported_s + report.queued_prefill_tokens * token_s
    for sent_s, request in sent:
        busy_until_s = max(busy_until_s, sent_s) + request.num_prompt_tokens * token_s
    return ServerLoad(
        num_requests=num_requests,
        num_rows=rows.number,
        largest_bytes=rows.largest_bytes,
        step_s=correction * step_s,
        row_s=correction * row_s,
        chunk_step_s=correction * chunk_step_s,
        busy_until_s=busy_until_s,
        queued_tokens=queued_tokens,
        free_kv_tokens=report.free_kv_tokens - queued_tokens,
        context_tokens=context_tokens,
        correction=correction,
        decode_s_per_byte=correction * lora.decode_s_per_byte,
        padded_s_per_token_byte=correction * lora.is_padded * lora.prefill_s_per_token_byte,
        row_wait_s=correction * step_s * num_too_many / max(rows.number, 1),
        kv_wait_s=correction * step_s / max(context_tokens, 1),
    )


def _rows(
    costs: ServerCosts, report: ServerReport, sent: Sequence[tuple[float, RouteRequest]], context_tokens: int
) -> tuple[int, _Rows]:
    """Return the number of requests, and the rows of a step. Loops are for speed.

    With padded kernels all rows count as the largest.
    """
    num_requests, sum_of_ranks, largest_rank = len(sent), 0, 0
    for by_rank in (report.num_running_by_rank, report.num_waiting_by_rank):
        for rank, number in by_rank.items():
            num_requests += number
            sum_of_ranks += rank * number
            if number and rank > largest_rank:
                largest_rank = rank
    num_bytes = costs.adapter_bytes_per_rank * sum_of_ranks
    largest_bytes = costs.adapter_bytes_per_rank * largest_rank
    for _, request in sent:
        num_bytes += request.num_bytes
        largest_bytes = max(largest_bytes, request.num_bytes)
    if costs.model.lora.is_padded:
        num_bytes = largest_bytes * num_requests
    number = min(num_requests, costs.max_num_seqs)
    share = number / num_requests if num_requests else 0.0
    return num_requests, _Rows(number, share * num_bytes, largest_bytes, share * context_tokens)


def prefill_s(costs: ServerCosts, num_tokens: int, adapter_bytes: float) -> float:
    """Return the time that chunks add to decode steps, without attention."""
    num_full, num_rest = divmod(num_tokens, costs.max_num_batched_tokens)
    full_s = rest_s = 0.0
    if num_full:
        full_s = num_full * _chunk_s(costs, costs.max_num_batched_tokens, adapter_bytes)
    if num_rest:
        rest_s = _chunk_s(costs, num_rest, adapter_bytes)
    return full_s + rest_s


def _chunk_s(costs: ServerCosts, num_tokens: int, adapter_bytes: float) -> float:
    model = costs.model
    lora_s = model.lora.prefill_s(num_tokens, int(adapter_bytes))
    without_s = max(model.read_s, model.step_s.at(0))
    return max(model.read_s, model.step_s.at(num_tokens) + lora_s) - without_s


def _decode_step_s(costs: ServerCosts, rows: _Rows, number: int) -> float:
    """Return the time of a step of ``number`` rows, with adapters and context of ``rows``."""
    model = costs.model
    keys_s = model.decode_s_per_key * (rows.context_tokens + number)
    row_costs = RowCosts(0, number, 0, 0.0, keys_s + model.host_row_s * number)
    lora_s = model.lora.decode_s((int(rows.adapter_bytes),))
    pass_and_lora_s = pass_s(model, row_costs) + lora_s
    return model.host_step_s + model.turn_s + model.turn_row_s * number + pass_and_lora_s

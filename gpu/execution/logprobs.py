"""Log-probabilities of tokens, for requests that ask for them.

Those of a prompt are computed chunk by chunk, and again if a chunk is computed again; the request
gets all of them with its first token.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from ...runtime.plan import SubBatch, TokenLogprobs
from ...runtime.sampling import MAX_LOGPROBS
from ..forward.upload import upload
from .request_table import RequestState


@dataclass(frozen=True, slots=True)
class ScoredSpan:
    """Packed tokens of a row with logits that score the next token of the prompt."""

    row: int
    state: RequestState
    first_position: int  # position of the first token in its request
    first_index: int  # index of the first token in the packed sequence
    num_tokens: int


def scored_spans(batch: SubBatch, states: Sequence[RequestState]) -> list[ScoredSpan]:
    """Return the spans of a sub-batch; ``states``: of its rows."""
    spans = []
    row_starts = itertools.accumulate(batch.num_tokens, initial=0)
    for row, (state, row_start) in enumerate(zip(states, row_starts, strict=False)):
        if state.sampling.prompt_logprobs is None:
            continue
        start = batch.start_positions[row]
        # The logits of the prompt's last token belong to the output.
        number = min(batch.num_tokens[row], state.num_prompt_tokens - 1 - start)
        if number > 0:
            spans.append(ScoredSpan(row, state, start, row_start, number))
    return spans


def packed_indices(spans: Sequence[ScoredSpan]) -> NDArray[np.int64]:
    """Return the packed indices of the logits that ``spans`` need: int64 [tokens]."""
    parts = [np.arange(one.first_index, one.first_index + one.num_tokens) for one in spans]
    return np.concatenate([np.empty(0, dtype=np.int64), *parts])


@torch.inference_mode()
def record_scores(logits: torch.Tensor, spans: Sequence[ScoredSpan]) -> None:
    """Store the scores from ``logits`` (float32 [tokens, vocabulary]) in the requests' states."""
    nexts = [
        one.state.tokens[one.first_position + 1 : one.first_position + 1 + one.num_tokens] for one in spans
    ]
    tokens = upload({"tokens": np.concatenate(nexts)}, logits.device)["tokens"]
    lengths = [one.num_tokens for one in spans]
    scores = [
        score(torch.log_softmax(part, dim=-1), wanted)
        for part, wanted in zip(logits.split(lengths), tokens.split(lengths), strict=True)
    ]
    for one, values in zip(spans, read(*scores), strict=True):
        counts = [one.state.sampling.prompt_logprobs or 0] * one.num_tokens
        one.state.prompt_scores.update(enumerate(reports(values, counts), one.first_position + 1))


def prompt_logprobs(state: RequestState) -> tuple[TokenLogprobs, ...] | None:
    """Return those of all tokens but the first, with the first sampled one; None if not wanted."""
    if state.sampling.prompt_logprobs is None or state.num_tokens != state.num_prompt_tokens:
        return None
    return tuple(state.prompt_scores[position] for position in range(1, state.num_prompt_tokens))


def score(logprobs: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Return what ``reports`` needs of ``token_ids``, without waiting for the device.

    logprobs: float32 [rows, vocabulary]; token_ids: int64 [rows]. Returns float64 [rows * (2 +
    2 n)], for each row: the token's log-probability, the number of better ones, and the n best
    tokens with their log-probabilities. n depends on the vocabulary alone, and so a row not on its
    neighbours.
    """
    chosen = logprobs.gather(1, token_ids[:, None])
    is_better = (logprobs > chosen).view(torch.uint8)  # summed in less time than bool
    num_better = is_better.sum(dim=-1, keepdim=True, dtype=torch.int32)
    values, columns = largest(logprobs, min(MAX_LOGPROBS, logprobs.shape[1]))
    return torch.cat((chosen.double(), num_better, columns, values), dim=1).flatten()


def reports(scores: Sequence[float], counts: Sequence[int]) -> list[TokenLogprobs]:
    """Return the log-probabilities of each row with its count of best tokens.

    scores: the values of ``score``. A small vocabulary has fewer tokens than a count.
    """
    width = len(scores) // len(counts)
    middle = 1 + width // 2
    rows = (scores[start : start + width] for start in range(0, len(scores), width))
    return [
        TokenLogprobs(
            logprob=row[0],
            rank=int(row[1]) + 1,
            top_token_ids=tuple(int(token) for token in row[2:middle][:count]),
            top_logprobs=tuple(row[middle:][:count]),
        )
        for row, count in zip(rows, counts, strict=True)
    ]


def largest(values: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``count`` largest of each row and their columns, equal ones by column.

    A plain topk orders equal ones differently for another ``count``; logits of half types are
    often equal.
    """
    if count == values.shape[1]:
        return values.sort(dim=-1, descending=True, stable=True)
    columns = values.topk(count, dim=-1, sorted=False).indices.sort(dim=-1).values
    found, positions = values.gather(-1, columns).sort(dim=-1, descending=True, stable=True)
    return found, columns.gather(-1, positions)


def read(*tensors: torch.Tensor) -> list[list[float]]:
    """Read tensors of one dimension in one copy: the device is waited for once."""
    # float64 has all token ids.
    values: list[float] = torch.cat([tensor.double() for tensor in tensors]).tolist()
    parts, start = [], 0
    for tensor in tensors:
        end = start + tensor.numel()
        parts.append(values[start:end])
        start = end
    return parts

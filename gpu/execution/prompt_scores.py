"""Log-probabilities of prompt tokens, for requests that ask for them.

They are computed chunk by chunk, and again if a chunk is computed again; the request gets all of
them with its first token.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ...runtime.plan import SubBatch, TokenLogprobs
from .request_table import RequestState


@dataclass(frozen=True, slots=True)
class ScoredSpan:
    """Packed tokens of a row with logits that score the next token of the prompt."""

    row: int
    state: RequestState
    first_position: int  # position of the first token in its request
    first_index: int  # index of the first token in the packed sequence
    num_tokens: int


def scored_spans(
    batch: SubBatch, states: Sequence[RequestState], row_starts: Sequence[int]
) -> list[ScoredSpan]:
    """Return the spans of a sub-batch; ``row_starts``: packed index of each row's first token."""
    spans = []
    for row, state in enumerate(states):
        if state.sampling.prompt_logprobs is None:
            continue
        start = batch.start_positions[row]
        # The logits of the prompt's last token belong to the output.
        number = min(batch.num_tokens[row], state.num_prompt_tokens - 1 - start)
        if number > 0:
            spans.append(ScoredSpan(row, state, start, row_starts[row], number))
    return spans


def packed_indices(spans: Sequence[ScoredSpan], device: torch.device) -> torch.Tensor:
    """Return the packed indices of the logits that ``spans`` need: int64 [tokens]."""
    parts = [torch.arange(one.first_index, one.first_index + one.num_tokens) for one in spans]
    return torch.cat(parts).to(device)


@torch.inference_mode()
def record_scores(logits: torch.Tensor, spans: Sequence[ScoredSpan]) -> None:
    """Store the scores from ``logits`` (float32 [tokens, vocabulary]) in the requests' states."""
    start = 0
    for one in spans:
        first = one.first_position + 1
        targets = torch.from_numpy(one.state.tokens[first : first + one.num_tokens])
        part = logits[start : start + one.num_tokens]
        start += one.num_tokens
        for position, score in enumerate(_scores(part, targets, one.state), start=first):
            one.state.prompt_scores[position] = score


def prompt_logprobs(state: RequestState) -> tuple[TokenLogprobs, ...] | None:
    """Return those of all tokens but the first, with the first sampled one; None if not wanted."""
    if state.sampling.prompt_logprobs is None or state.num_tokens != state.num_prompt_tokens:
        return None
    return tuple(state.prompt_scores[position] for position in range(1, state.num_prompt_tokens))


def _scores(
    logits: torch.Tensor, targets: torch.Tensor, state: RequestState
) -> list[TokenLogprobs]:
    logprobs = torch.log_softmax(logits, dim=-1)
    chosen = logprobs.gather(1, targets.to(logits.device)[:, None])
    ranks = (logprobs > chosen).sum(dim=-1) + 1
    count = min(state.sampling.prompt_logprobs or 0, logits.shape[1])
    top = logprobs.topk(count, dim=-1)
    return [
        TokenLogprobs(logprob, rank, tuple(ids), tuple(values))
        for logprob, rank, ids, values in zip(
            chosen[:, 0].tolist(), ranks.tolist(), top.indices.tolist(), top.values.tolist(),
            strict=True,
        )
    ]  # fmt: skip

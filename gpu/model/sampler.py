"""Draws the next token of each row from its logits.

Log-probabilities are those of the model, before penalties and temperature. Draws use one uniform
number per (seed, position), so a request's tokens do not depend on its neighbours.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ...runtime.plan import TokenLogprobs
from ...runtime.sampling import SamplingParams
from .random import uniform
from .request_table import RequestState

_NUM_CANDIDATES = 1024  # the nucleus is looked for among these before the vocabulary is sorted
_UINT64_MASK = 2**64 - 1


@dataclass(frozen=True, slots=True)
class SampledRow:
    """A row's token, or why it has none."""

    token_id: int
    logprobs: TokenLogprobs | None
    error: str | None = None


class Sampler:
    """Samples rows of logits; ``eos_token_ids`` are masked until a row's ``min_tokens``."""

    def __init__(self, eos_token_ids: Sequence[int]) -> None:
        self._eos_token_ids = tuple(eos_token_ids)

    @torch.inference_mode()  # what the runner computes may be changed only in this mode
    def sample(self, logits: torch.Tensor, states: Sequence[RequestState]) -> list[SampledRow]:
        """Draw one token per row.

        Args:
            logits: float32 [rows, vocabulary]; changed in place.
            states: The rows' requests; not changed.

        Returns:
            One entry per row. A row whose logits are NaN or infinite has an error and token -1;
            the others are not affected.
        """
        # NaN and +inf survive a maximum; a row of -inf alone has -inf.
        finite = torch.isfinite(logits.amax(dim=-1)).tolist()
        logprobs = _report_logprobs_source(logits, states)
        self._adjust(logits, states)
        token_ids = logits.argmax(dim=-1).tolist()
        drawn = [i for i, s in enumerate(states) if s.sampling.temperature > 0 and finite[i]]
        if drawn:
            tokens = _draw(logits[drawn], [states[i] for i in drawn])
            for i, token_id in zip(drawn, tokens, strict=True):
                token_ids[i] = token_id
        return [
            _row(token_ids[i], states[i], logprobs.get(i))
            if finite[i]
            else SampledRow(-1, None, "the model computed logits that are not finite (NaN or inf)")
            for i in range(len(states))
        ]

    def _adjust(self, logits: torch.Tensor, states: Sequence[RequestState]) -> None:
        """Apply penalties and hold back end tokens, in place."""
        for row, state in enumerate(states):
            sampling = state.sampling
            num_output = state.num_tokens - state.num_prompt_tokens
            if num_output < sampling.min_tokens:
                ends = () if sampling.ignore_eos else self._eos_token_ids
                held = [t for t in (*ends, *sampling.stop_token_ids) if t < logits.shape[1]]
                if held:
                    logits[row, held] = float("-inf")
            if sampling.repetition_penalty != 1.0:
                _penalise_repetition(logits[row], state)
            if sampling.presence_penalty or sampling.frequency_penalty:
                _penalise_frequency(logits[row], state)


def _report_logprobs_source(
    logits: torch.Tensor, states: Sequence[RequestState]
) -> dict[int, torch.Tensor]:
    """Log-probabilities of the rows that asked for them, before anything is adjusted."""
    rows = [i for i, state in enumerate(states) if state.sampling.logprobs is not None]
    if not rows:
        return {}
    return dict(zip(rows, torch.log_softmax(logits[rows], dim=-1), strict=True))


def _row(token_id: int, state: RequestState, logprobs: torch.Tensor | None) -> SampledRow:
    if logprobs is None:
        return SampledRow(token_id, None)
    count = min(state.sampling.logprobs or 0, len(logprobs))
    top = logprobs.topk(count)
    chosen = logprobs[token_id]
    report = TokenLogprobs(
        logprob=float(chosen),
        rank=int((logprobs > chosen).sum()) + 1,
        top_token_ids=tuple(top.indices.tolist()),
        top_logprobs=tuple(top.values.tolist()),
    )
    return SampledRow(token_id, report)


def _penalise_repetition(row: torch.Tensor, state: RequestState) -> None:
    """Divide positive and multiply negative logits of tokens seen in prompt or output."""
    penalty = state.sampling.repetition_penalty
    seen = torch.from_numpy(np.unique(state.tokens[: state.num_tokens])).to(row.device)
    values = row[seen]
    row[seen] = torch.where(values > 0, values / penalty, values * penalty)


def _penalise_frequency(row: torch.Tensor, state: RequestState) -> None:
    """Subtract presence and frequency penalties of tokens in the output."""
    tokens, counts = np.unique(state.output_tokens, return_counts=True)
    index = torch.from_numpy(tokens).to(row.device)
    times = torch.from_numpy(counts).to(row.device, row.dtype)
    sampling = state.sampling
    row[index] -= sampling.presence_penalty + sampling.frequency_penalty * times


def _draw(logits: torch.Tensor, states: Sequence[RequestState]) -> list[int]:
    """Draw by the inverse of the cumulative distribution.

    logits: float32 [rows, vocabulary]. Rows without top_k, top_p and min_p are drawn over the
    vocabulary in its own order; the others over candidates, most likely first.
    """
    numbers = _uniform_numbers(states, logits.device)
    temperatures = torch.tensor([s.sampling.temperature for s in states], device=logits.device)
    # The maximum is taken off first: a tiny temperature must not turn it into infinity.
    scaled = (logits - logits.amax(dim=-1, keepdim=True)) / temperatures[:, None]
    probs = torch.softmax(scaled, dim=-1)
    tokens = _invert(probs, numbers)
    cut = [i for i, state in enumerate(states) if _is_cut(state.sampling)]
    if cut:
        chosen = _draw_cut(probs[cut], numbers[cut], [states[i].sampling for i in cut])
        for i, token in zip(cut, chosen, strict=True):
            tokens[i] = token
    return tokens


def _uniform_numbers(states: Sequence[RequestState], device: torch.device) -> torch.Tensor:
    """One number in [0, 1) per row: float64 [rows]."""
    seeds = np.array([(s.sampling.seed or 0) & _UINT64_MASK for s in states], dtype=np.uint64)
    positions = np.array([s.num_tokens for s in states], dtype=np.uint64)
    return torch.from_numpy(uniform(seeds, positions)).to(device)


def _is_cut(sampling: SamplingParams) -> bool:
    return sampling.top_k > 0 or sampling.top_p < 1.0 or sampling.min_p > 0.0


def _draw_cut(
    probs: torch.Tensor, numbers: torch.Tensor, params: Sequence[SamplingParams]
) -> list[int]:
    """Keep min_p, then top_k, then the top_p nucleus of what is left; draw among it."""
    vocab_size = probs.shape[1]
    num_candidates = min(vocab_size, max(_NUM_CANDIDATES, *(p.top_k for p in params)))
    kept, order = _candidates(probs, num_candidates, params)
    if not _covers(kept, params, vocab_size):
        kept, order = _candidates(probs, vocab_size, params)
    columns = _invert(kept, numbers)
    return order.gather(1, torch.tensor(columns, device=order.device)[:, None])[:, 0].tolist()


def _candidates(
    probs: torch.Tensor, count: int, params: Sequence[SamplingParams]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The most likely tokens with what is cut set to zero: (float32, int64) [rows, count]."""
    values, order = probs.topk(count, dim=-1, sorted=True)
    device = probs.device
    min_p = torch.tensor([p.min_p for p in params], device=device)[:, None]
    top_k = torch.tensor([p.top_k if p.top_k > 0 else probs.shape[1] for p in params])
    top_p = torch.tensor([p.top_p for p in params], device=device, dtype=torch.float64)[:, None]
    ranks = torch.arange(count, device=device)[None]
    keep = (values >= min_p * values[:, :1]) & (ranks < top_k.to(device)[:, None])
    values = values * keep
    total = _totals(values, probs, params)
    before = values.double().cumsum(dim=-1) - values
    # The token that crosses top_p is part of the nucleus; the first one always is.
    return values * ((before < top_p * total) | (ranks == 0)), order


def _totals(
    values: torch.Tensor, probs: torch.Tensor, params: Sequence[SamplingParams]
) -> torch.Tensor:
    """Mass that top_p refers to: of the kept tokens, or of all where nothing else cuts."""
    cut = torch.tensor([p.top_k > 0 or p.min_p > 0.0 for p in params], device=probs.device)
    ones = torch.ones(len(params), device=probs.device, dtype=torch.float64)
    return torch.where(cut, values.double().sum(dim=-1), ones)[:, None]


def _covers(kept: torch.Tensor, params: Sequence[SamplingParams], vocab_size: int) -> bool:
    """Whether the candidates hold everything that could be kept: the last one was cut."""
    return kept.shape[1] == vocab_size or not bool((kept[:, -1] > 0).any())


def _invert(probs: torch.Tensor, numbers: torch.Tensor) -> list[int]:
    """First column whose cumulative probability exceeds ``number`` times the row's total."""
    cumulative = probs.double().cumsum(dim=-1)
    points = numbers[:, None] * cumulative[:, -1:]
    columns = torch.searchsorted(cumulative, points, right=True)[:, 0]
    last = (probs > 0).long().mul(torch.arange(1, probs.shape[1] + 1, device=probs.device))
    return torch.minimum(columns, last.amax(dim=-1) - 1).tolist()

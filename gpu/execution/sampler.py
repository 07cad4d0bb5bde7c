"""Draws the next token of each row from its logits.

Log-probabilities are those of the model, before penalties and temperature. Draws use one uniform
number per (seed, position), so a request's tokens do not depend on its neighbours.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from ...runtime.errors import CorunError, RequestError
from ...runtime.plan import TokenLogprobs
from ...runtime.sampling import SamplingParams
from .grammar_thread import GrammarThread
from .logit_inputs import LogitInputs
from .random import uniform
from .request_table import RequestState
from .row_grammar import MakeMatcher, RowGrammar

_NUM_CANDIDATES = 1024  # the nucleus is searched among these before sorting the vocabulary
_UINT64_MASK = 2**64 - 1
_NOT_FINITE = "the model computed logits that are not finite (NaN or inf)"
_NOTHING_LEFT = (
    "no token can be drawn: bad_words, allowed_token_ids or min_tokens with stop_token_ids forbid "
    "all (that the grammar of structured output allows), or repetition_penalty makes the logits "
    "overflow"
)


@dataclass(frozen=True, slots=True)
class SampledRow:
    """A row's token, or why there is none."""

    token_id: int
    logprobs: TokenLogprobs | None
    error: str | None = None
    error_kind: str | None = None  # a class in ``runtime/errors.py``, if the request is the cause
    is_last: bool = False  # the answer is whole: its grammar allows nothing more
    forced: tuple[int, ...] = ()  # tokens after it that the grammar forces


_NOT_FINITE_ROW = SampledRow(-1, None, _NOT_FINITE)
_NOTHING_LEFT_ROW = SampledRow(-1, None, _NOTHING_LEFT, RequestError.__name__)


class Sampler:
    """Samples rows of logits; ``eos_token_ids`` are masked until a row's ``min_tokens``."""

    def __init__(
        self, eos_token_ids: Sequence[int], make_matcher: MakeMatcher | None = None,
        cpus: tuple[int, ...] = (),
    ) -> None:  # fmt: skip
        """``make_matcher``: called by a thread on ``cpus``; None = no structured output."""
        self._eos_token_ids = tuple(eos_token_ids)
        self._inputs = LogitInputs()
        self._grammars: GrammarThread | None = None
        if make_matcher is not None:
            self._grammars = GrammarThread(make_matcher, eos_token_ids, cpus)

    def begin(self, states: Sequence[RequestState]) -> None:
        """Begin to make the masks of new requests with structured output."""
        constrained = [state for state in states if state.sampling.structured_output is not None]
        if constrained:
            assert self._grammars is not None, "there is no structured output here"
            self._grammars.begin(constrained)

    @torch.inference_mode()  # the runner's tensors may be changed only in this mode
    def sample(self, logits: torch.Tensor, states: Sequence[RequestState]) -> list[SampledRow]:
        """Draw one token per row.

        Args:
            logits: float32 [rows, vocabulary]; changed in place.
            states: The rows' requests; not changed.

        Returns:
            One entry per row. A row with NaN or infinite logits, or with parameters that exclude
            every token, has an error and token -1; other rows are not affected.
        """
        largest = logits.amax(dim=-1)  # NaN and +inf survive; a row of -inf alone has -inf
        logprobs = _report_logprobs_source(logits, states)
        errors = self._adjust(logits, states)
        best = _first_largest(logits)
        left = logits.gather(1, best[:, None])[:, 0]
        # One copy, so that the device is waited for once; float64 has all token ids.
        facts = torch.stack((largest.double(), best.double(), left.double())).tolist()
        token_ids = [int(token) for token in facts[1]]
        for i, (before, after) in enumerate(zip(facts[0], facts[2], strict=True)):
            if not math.isfinite(before):
                errors[i] = _NOT_FINITE_ROW
            elif not math.isfinite(after):
                errors.setdefault(i, _NOTHING_LEFT_ROW)
        drawn = [i for i, s in enumerate(states) if s.sampling.temperature > 0 and i not in errors]
        if drawn:
            tokens = _draw(logits[drawn], [states[i] for i in drawn])
            for i, token_id in zip(drawn, tokens, strict=True):
                token_ids[i] = token_id
        return [
            errors[i] if i in errors else _row(token_ids[i], states[i], logprobs.get(i))
            for i in range(len(states))
        ]

    def take(self, rows: Sequence[tuple[RequestState, SampledRow]]) -> list[SampledRow]:
        """Append drawn and forced tokens to their requests; begin to make the masks of the next.

        Returns the rows, with the forced tokens, or an error if the grammar of one fails.
        """
        taken, constrained = [], []
        for state, drawn in rows:
            row = drawn
            if row.error is None:
                state.append(row.token_id)
                if state.grammar is not None:
                    row = _checked(row, state.grammar, state)
                    if row.error is None and not row.is_last:
                        constrained.append(state)
            taken.append(row)
        if constrained:
            assert self._grammars is not None
            self._grammars.fill(constrained)
        return taken

    def close(self) -> None:
        """End the thread. Idempotent."""
        if self._grammars is not None:
            self._grammars.close()

    def _adjust(
        self, logits: torch.Tensor, states: Sequence[RequestState]
    ) -> dict[int, SampledRow]:
        """Apply masks, rules and penalties; return the errors of grammars, by row.

        A row may have no finite logit left: a request can forbid its whole vocabulary, or give a
        penalty that overflows.
        """
        errors = {}
        self._inputs.begin()
        for row, state in enumerate(states):
            try:
                self._collect(row, state)
            except CorunError as error:
                errors[row] = _failed_row(error)
        if self._inputs:
            self._inputs.apply(logits)
        for row, state in enumerate(states):
            sampling = state.sampling
            if sampling.repetition_penalty != 1.0:
                _penalise_repetition(logits[row], state)
            if sampling.presence_penalty or sampling.frequency_penalty:
                _penalise_frequency(logits[row], state)
        return errors

    def _collect(self, row: int, state: RequestState) -> None:
        """Collect the inputs of one row. Raises ``CorunError`` if its grammar has failed."""
        sampling, rules, grammar = state.sampling, state.token_rules, state.grammar
        inputs = self._inputs
        if grammar is None and state.num_tokens - state.num_prompt_tokens < sampling.min_tokens:
            ends = () if sampling.ignore_eos else self._eos_token_ids
            inputs.forbid(row, [*ends, *sampling.stop_token_ids])
        masks = [] if grammar is None else [grammar.mask(state.output)]
        if rules is not None:
            if rules.mask is not None:
                masks.append(rules.mask)
            inputs.add(row, rules.biased, rules.biases)
            inputs.forbid(row, rules.forbidden(state.output))
        if masks:
            inputs.allow(row, *masks)


def _first_largest(logits: torch.Tensor) -> torch.Tensor:
    """The first column with the largest value of each row, as int64; NaN counts as the largest."""
    if logits.is_cuda:
        return logits.argmax(dim=-1)
    # torch takes 7 to 27 times as long for rows of 151,640 float32 (16 rows to one).
    return torch.from_numpy(logits.numpy().argmax(axis=-1))


def _checked(row: SampledRow, grammar: RowGrammar, state: RequestState) -> SampledRow:
    """Have the row's grammar consume its token, the last one of ``state``; add forced tokens."""
    try:
        if grammar.take(state.output):
            return replace(row, is_last=True)
        forced = grammar.forced(state.output, state.room)
        if not forced:
            return row
        for token_id in forced:
            state.append(token_id)
        return replace(row, forced=tuple(forced), is_last=grammar.take(state.output))
    except CorunError as error:
        return _failed_row(error)


def _failed_row(error: CorunError) -> SampledRow:
    return SampledRow(-1, None, str(error), error.kind)


def _report_logprobs_source(
    logits: torch.Tensor, states: Sequence[RequestState]
) -> dict[int, torch.Tensor]:
    """Log-probabilities of the rows that ask for them, before any adjustment."""
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
    seen = torch.from_numpy(state.seen_tokens()).to(row.device)
    values = row[seen]
    row[seen] = torch.where(values > 0, values / penalty, values * penalty)


def _penalise_frequency(row: torch.Tensor, state: RequestState) -> None:
    """Subtract presence and frequency penalties of tokens in the output."""
    tokens, counts = state.output_counts()
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
    temperatures = torch.tensor(
        [s.sampling.temperature for s in states], dtype=torch.float32, device=logits.device
    )
    temperatures.clamp_(min=torch.finfo(torch.float32).tiny)  # a positive value must not become 0
    # The maximum is subtracted first: a tiny temperature must not turn it into infinity.
    scaled = (logits - logits.amax(dim=-1, keepdim=True)) / temperatures[:, None]
    probs = torch.softmax(scaled, dim=-1)
    tokens = [-1] * len(states)
    for is_cut, draw in ((False, _draw_whole), (True, _draw_cut)):
        rows = [i for i, state in enumerate(states) if _is_cut(state.sampling) == is_cut]
        if not rows:
            continue
        part = probs if len(rows) == len(states) else probs[rows]
        drawn = draw(part, numbers[rows], [states[i].sampling for i in rows])
        for i, token in zip(rows, drawn, strict=True):
            tokens[i] = token
    return tokens


def _uniform_numbers(states: Sequence[RequestState], device: torch.device) -> torch.Tensor:
    """One number in [0, 1) per row: float64 [rows]."""
    seeds = np.array([(s.sampling.seed or 0) & _UINT64_MASK for s in states], dtype=np.uint64)
    positions = np.array([s.num_tokens for s in states], dtype=np.uint64)
    return torch.from_numpy(uniform(seeds, positions)).to(device)


def _is_cut(sampling: SamplingParams) -> bool:
    return sampling.top_k > 0 or sampling.top_p < 1.0 or sampling.min_p > 0.0


def _draw_whole(
    probs: torch.Tensor, numbers: torch.Tensor, params: Sequence[SamplingParams]
) -> list[int]:
    """Draw from all tokens; no parameter excludes any."""
    return _invert(probs, numbers)


def _draw_cut(
    probs: torch.Tensor, numbers: torch.Tensor, params: Sequence[SamplingParams]
) -> list[int]:
    """Apply min_p, then top_k, then the top_p nucleus of the rest; draw from what remains."""
    count = min(probs.shape[1], _NUM_CANDIDATES)
    kept, order, is_complete = _candidates(probs, count, params)
    columns = torch.tensor(_invert(kept, numbers), device=order.device)
    tokens: list[int] = order.gather(1, columns[:, None])[:, 0].tolist()
    open_rows = [row for row, complete in enumerate(is_complete) if not complete]
    if open_rows:  # the vocabulary is sorted only for these
        some = [params[row] for row in open_rows]
        kept, order, _ = _candidates(probs[open_rows], probs.shape[1], some)
        for row, column, tokens_of_row in zip(
            open_rows, _invert(kept, numbers[open_rows]), order, strict=True
        ):
            tokens[row] = int(tokens_of_row[column])
    return tokens


def _candidates(
    probs: torch.Tensor, count: int, params: Sequence[SamplingParams]
) -> tuple[torch.Tensor, torch.Tensor, list[bool]]:
    """The ``count`` most likely tokens, with excluded ones set to zero, and their ids.

    Returns float32 [rows, count], int64 [rows, count], and for each row whether more candidates
    would change nothing. Then a row does not depend on ``count``, and so not on its neighbours.
    """
    values, order = _largest(probs, count)
    device = probs.device
    min_p = torch.tensor([p.min_p for p in params], device=device)[:, None]
    top_k = torch.tensor([p.top_k if p.top_k > 0 else probs.shape[1] for p in params])
    top_p = torch.tensor([p.top_p for p in params], device=device, dtype=torch.float64)[:, None]
    has_cut = torch.tensor([p.top_k > 0 or p.min_p > 0.0 for p in params], device=device)[:, None]
    ranks = torch.arange(count, device=device)[None]
    first_kept = (values >= min_p * values[:, :1]) & (ranks < top_k.to(device)[:, None])
    first_values = values * first_kept
    # The mass that top_p refers to: of the kept tokens, or of all tokens without another limit.
    mass = first_values.sum(dim=-1, keepdim=True, dtype=torch.float64).masked_fill(~has_cut, 1.0)
    before = first_values.cumsum(dim=-1, dtype=torch.float64) - first_values
    # The token that crosses top_p is part of the nucleus; the first one always is.
    kept = first_values * ((before < top_p * mass) | (ranks == 0))
    # Nothing is missing if the last candidate is less likely than all deciding ones: of equally
    # likely tokens, only some may be among the candidates.
    deciding = torch.where(has_cut, first_values, kept)
    least = deciding.masked_fill(deciding == 0, float("inf")).amin(dim=-1)
    is_complete = (least > values[:, -1]).tolist()
    return kept, order, is_complete


def _largest(probs: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``count`` largest of each row and their columns, equal ones by column.

    A plain topk orders equal ones differently for another ``count``; logits of half types are
    often equal.
    """
    if count == probs.shape[1]:
        return probs.sort(dim=-1, descending=True, stable=True)
    columns = probs.topk(count, dim=-1, sorted=False).indices.sort(dim=-1).values
    values, positions = probs.gather(-1, columns).sort(dim=-1, descending=True, stable=True)
    return values, columns.gather(-1, positions)


def _invert(probs: torch.Tensor, numbers: torch.Tensor) -> list[int]:
    """First column with a cumulative probability above ``number`` times the row's total."""
    cumulative = probs.cumsum(dim=-1, dtype=torch.float64)
    totals = cumulative[:, -1:].contiguous()
    columns = torch.searchsorted(cumulative, numbers[:, None] * totals, right=True)
    # A number just below 1 may round to the total, which no column exceeds.
    last = torch.searchsorted(cumulative, totals)
    return torch.minimum(columns, last)[:, 0].tolist()

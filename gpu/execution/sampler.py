"""Draws the next token of each row from its logits.

Log-probabilities are those of the model, before penalties and temperature. All of a step is
enqueued before the device is waited for, once. A CPU then draws those rows again that have a larger
nucleus than the candidates; CUDA has a kernel for them.
"""

import math
import queue
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from ...cpu_workers.affinity import place_thread
from ...runtime.errors import CorunError, RequestError
from ...runtime.plan import TokenLogprobs
from ..forward.upload import upload
from .draws import Draws, RandomRows
from .logit_inputs import LogitInputs
from .logprobs import read, reports, score
from .request_table import RequestState
from .row_grammar import Filling, MakeMatcher, RowGrammar

_NOT_FINITE = "the model computed logits that are not finite (NaN or inf)"
_NOTHING_LEFT = (
    "no token can be drawn: bad_words, allowed_token_ids or min_tokens with stop_token_ids forbid "
    "all (that the grammar of structured output allows), or repetition_penalty makes the logits "
    "overflow"
)


_Work = list[tuple[RowGrammar, NDArray[np.int64]]]  # rows, and copies of their outputs


# A row's mask depends only on its tokens so far. So it is filled from the end of one step on, and
# awaited when the next one samples the row.
class GrammarThread:
    """Owns the thread. All methods belong to the engine's thread."""

    def __init__(self, make: MakeMatcher, eos_token_ids: Sequence[int], cpus: tuple[int, ...] = ()) -> None:
        """``make``: called by the thread; ``cpus``: its cores, () = those of the caller."""
        self._make = make
        self._eos_token_ids = eos_token_ids
        self._cpus = cpus
        self._work: queue.SimpleQueue[tuple[Filling, _Work] | None] = queue.SimpleQueue()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="corun-grammars", daemon=True)
        self._thread.start()

    def begin(self, states: Iterable[RequestState]) -> None:
        """Begin to make the matchers of new requests."""
        begun = []
        for state in states:
            structured = state.sampling.structured_output
            if structured is not None:
                # Tokens of other rows may be forbidden, or their logits are reported.
                may_force = (
                    state.sampling.structured_forced_tokens
                    and state.sampling.logprobs is None
                    and state.token_rules is None
                )
                state.grammar = RowGrammar(
                    self._make, structured, state.sampling, self._eos_token_ids, may_force=may_force
                )
                begun.append(state)
        self.fill(begun)

    def fill(self, states: Iterable[RequestState]) -> None:
        """Begin to fill the masks of the tokens that come next in these rows."""
        work = [(state.grammar, state.output.copy()) for state in states if state.grammar is not None]
        if not work:
            return
        filling = Filling()
        for grammar, _ in work:
            grammar.filling = filling
        self._work.put((filling, work))

    def close(self) -> None:
        """End the thread, without what it has not begun. Idempotent."""
        self._is_closed = True
        self._work.put(None)
        self._thread.join()

    def _run(self) -> None:
        place_thread(self._cpus)
        while (taken := self._work.get()) is not None and not self._is_closed:
            filling, work = taken
            for grammar, output in work:
                grammar.fill(output)
            filling.end()


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
        self,
        eos_token_ids: Sequence[int],
        make_matcher: MakeMatcher | None = None,
        cpus: tuple[int, ...] = (),
    ) -> None:
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
        errors = self._collect(logits.shape[1], states)
        random = RandomRows.of(states)
        scored = [row for row, state in enumerate(states) if state.sampling.logprobs is not None]
        sent = self._upload(random, scored, logits.device)
        logprobs = None
        if scored:  # before any adjustment
            is_all = len(scored) == len(states)
            logprobs = torch.log_softmax(
                logits if is_all else logits.index_select(0, sent["scored_rows"]), dim=-1
            )
        if sent:
            self._inputs.apply(logits, sent)
        tokens = _first_largest(logits)
        left = logits.gather(1, tokens[:, None])[:, 0]
        draws = None
        facts = [largest, left]
        if random is not None:
            draws = Draws(random, sent, logits, (left, tokens))
            tokens = draws.tokens
            if draws.is_complete is not None:
                facts.append(draws.is_complete)

        def answers() -> list[torch.Tensor]:
            """The tokens, and the scores of those that are reported."""
            if logprobs is None:
                return [tokens]
            chosen = tokens if len(scored) == len(states) else tokens[sent["scored_rows"]]
            return [tokens, score(logprobs, chosen)]

        before, after, *values = read(*facts, *answers())
        _add_errors(errors, before, after)
        if draws is not None and draws.is_complete is not None and draws.complete(values.pop(0), errors):
            values = read(*answers())  # rare
        counts = [states[row].sampling.logprobs or 0 for row in scored]
        reported = dict(zip(scored, reports(values[1], counts), strict=True)) if scored else {}
        return [
            errors.get(row) or SampledRow(int(token), reported.get(row))
            for row, token in enumerate(values[0])
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

    def _upload(
        self, random: RandomRows | None, scored: Sequence[int], device: torch.device
    ) -> dict[str, torch.Tensor]:
        """All inputs of a step on the device, in one copy."""
        arrays = self._inputs.arrays()
        if random is not None:
            arrays |= random.arrays
        if scored:
            arrays["scored_rows"] = np.array(scored, dtype=np.int64)
        return upload(arrays, device) if arrays else {}

    def _collect(self, num_columns: int, states: Sequence[RequestState]) -> dict[int, SampledRow]:
        """Collect masks, rules and penalties; return the errors of grammars, by row.

        A row may have no finite logit left: a request can forbid its whole vocabulary, or give a
        penalty that overflows.
        """
        errors = {}
        self._inputs.begin(num_columns)
        for row, state in enumerate(states):
            if state.changes_logits:
                try:
                    self._collect_row(row, state)
                except CorunError as error:
                    errors[row] = _failed_row(error)
        return errors

    def _collect_row(self, row: int, state: RequestState) -> None:
        """Collect the inputs of one row. Raises ``CorunError`` if its grammar has failed."""
        sampling, rules, grammar = state.sampling, state.token_rules, state.grammar
        inputs = self._inputs
        inputs.penalise(row, state)
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


def _add_errors(errors: dict[int, SampledRow], before: Sequence[float], after: Sequence[float]) -> None:
    """Add an error for each row without a finite largest logit, before or after adjustments."""
    for row, (one, other) in enumerate(zip(before, after, strict=True)):
        if not math.isfinite(one):
            errors[row] = _NOT_FINITE_ROW
        elif not math.isfinite(other):
            errors.setdefault(row, _NOTHING_LEFT_ROW)


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

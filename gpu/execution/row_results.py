"""What became of the rows of one pass: draws their tokens and keeps them."""

from collections.abc import Collection, Sequence

import torch

from ...runtime.plan import Outcome, RetryCause, RowResult, SubBatch
from .request_table import RequestState
from .sampler import Sampler

_VOID = "a CPU worker or a copy of the adapter failed"


class RowResults:
    """Makes the results of passes."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler

    def make(
        self,
        batch: SubBatch,
        states: Sequence[RequestState],
        logits: torch.Tensor,
        void: Collection[int],
    ) -> list[RowResult]:
        """Sample, and keep what was drawn; rows in ``void`` are retried.

        states: one per row; logits: float32 [rows that sample, vocabulary].
        """
        results = [
            RowResult(batch.request_ids[row], Outcome.RETRY, error=_VOID, cause=RetryCause.DELTAS)
            for row in void
        ]
        sampling_rows = [row for row, samples in enumerate(batch.samples) if samples]
        if not sampling_rows:
            return results
        for row in sampling_rows:
            states[row].cut(batch.start_positions[row] + batch.num_tokens[row])
        drawn = self._sampler.sample(logits, [states[row] for row in sampling_rows])
        for row, sampled in zip(sampling_rows, drawn, strict=True):
            request_id = batch.request_ids[row]
            if row in void:
                continue
            if sampled.error is not None:
                failed = RowResult(
                    request_id,
                    Outcome.FAILED,
                    error=sampled.error,
                    error_kind=sampled.error_kind,
                )
                results.append(failed)
                continue
            states[row].append(sampled.token_id)
            logprobs = None if sampled.logprobs is None else (sampled.logprobs,)
            results.append(
                RowResult(request_id, Outcome.TOKENS, (sampled.token_id,), logprobs=logprobs)
            )
        return results

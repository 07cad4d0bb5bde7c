"""Biases, allowed tokens and bad words, against transformers' own processors of logits."""

from typing import Any

import numpy as np
import pytest
import torch
from corun.gpu.execution.logit_inputs import LogitInputs
from corun.gpu.execution.token_rules import TokenRules
from corun.gpu.forward.upload import upload
from corun.runtime.sampling import SamplingParams
from transformers.generation.logits_process import (
    NoBadWordsLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

VOCAB = 20
BAD = ((7,), (1, 2, 3), (4, 5))


def applied(output: list[int], **params: Any) -> torch.Tensor:
    rules = TokenRules.of(SamplingParams(**params))
    assert rules is not None
    rows, inputs = _logits()[None], LogitInputs(VOCAB)
    if rules.mask is not None:
        inputs.allow(0, rules.mask)
    inputs.add(0, rules.biased, rules.biases)
    inputs.forbid(0, rules.forbidden(np.array(output, dtype=np.int64)))
    inputs.apply(rows, upload(inputs.arrays(), rows.device))
    return rows[0]


def _logits() -> torch.Tensor:
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(0))


def _reference(processor: Any, output: list[int]) -> torch.Tensor:
    # An additional first token: transformers' processors read prompts, too.
    ids = torch.tensor([[0, *output]])
    scores: torch.Tensor = processor(ids, _logits()[None])[0]
    return scores


def test_nothing_asked_is_no_rule() -> None:
    assert TokenRules.of(SamplingParams()) is None
    assert TokenRules.of(SamplingParams(logit_bias={}, bad_words=("x",))) is None


def test_biases_are_those_of_transformers() -> None:
    biases = {3: 5.5, 0: -100.0, 19: 100.0}
    sequence_bias = [[[token], bias] for token, bias in biases.items()]
    expected = _reference(SequenceBiasLogitsProcessor(sequence_bias), [4])
    assert torch.equal(applied([4], logit_bias=biases), expected)


def test_only_allowed_tokens_are_left() -> None:
    allowed = (4, 2, 2, 19)
    others = [token for token in range(VOCAB) if token not in allowed]
    expected = _reference(SuppressTokensLogitsProcessor(others), [1])
    assert torch.equal(applied([1], allowed_token_ids=allowed), expected)


@pytest.mark.parametrize("output", [[], [1], [1, 2], [2, 1, 2], [1, 2, 3], [4], [9, 4], [1, 4, 2]])
def test_bad_words_are_kept_away_by_their_last_token(output: list[int]) -> None:
    processor = NoBadWordsLogitsProcessor([list(word) for word in BAD], eos_token_id=VOCAB - 1)
    expected = _reference(processor, output)
    assert torch.equal(applied(output, bad_words_ids=BAD), expected)


def test_a_bias_does_not_bring_back_what_is_not_allowed() -> None:
    row = applied([], logit_bias={3: 100.0}, allowed_token_ids=(4,))
    assert torch.isinf(row[3]) and torch.isfinite(row[4])

"""Samples as padded tensors, grouped by length so that little of a step is padding."""

from collections.abc import Sequence

import torch

from demo.chat import PAD, SPECIAL_IDS
from demo.corpus import IGNORED, Sample


def padded_batch(samples: Sequence[Sample]) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and the targets of the next token, both int64 [samples, longest - 1].

    Padding stands on the right, where causal attention cannot see it, and has no target.
    """
    width = max(len(sample.tokens) for sample in samples)
    tokens = torch.full((len(samples), width), SPECIAL_IDS[PAD])
    targets = torch.full((len(samples), width), IGNORED)
    for row, sample in enumerate(samples):
        tokens[row, : len(sample.tokens)] = torch.tensor(sample.tokens)
        targets[row, : len(sample.targets)] = torch.tensor(sample.targets)
    return tokens[:, :-1], targets[:, 1:]


def length_groups(samples: Sequence[Sample], num_groups: int) -> list[list[Sample]]:
    """``samples`` sorted by length and cut into groups of about the same number of tokens."""
    ordered = sorted(samples, key=lambda sample: len(sample.tokens))
    total_tokens = sum(len(sample.tokens) for sample in ordered)
    groups: list[list[Sample]] = [[] for _ in range(num_groups)]
    num_tokens = 0
    for sample in ordered:
        groups[min(num_groups - 1, num_tokens * num_groups // total_tokens)].append(sample)
        num_tokens += len(sample.tokens)
    return [group for group in groups if group]

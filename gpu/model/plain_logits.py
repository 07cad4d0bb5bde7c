"""Computes logits with plain transformers, and how far rounding alone may change them.

Two correct orders of adding the same numbers differ in the last places, and a deep model or a
router that decides by a small margin amplifies this. The amplification is measured: the embeddings
are changed at random by about one last place, and the change of the logits at a position shows how
far apart two correct results may be there.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from ...runtime.errors import ModelError
from .attention_hook import PagedAttentionHook
from .source import describe

# Relative errors that need no measuring. In float32 any real difference is far above.
_FLOOR = {torch.float32: 1e-3, torch.bfloat16: 2e-2, torch.float16: 3e-3}
_NUM_MOVED = 4
_NOISE_FACTOR = 3.0  # of the largest change; correct results differed by up to 1.9 times as much
_MAX_LIMIT = 1.0  # unrelated logits differ more


@dataclass(frozen=True, slots=True)
class Comparison:
    """Errors at one position, as shares of the largest expected logit."""

    error: float
    limit: float

    @property
    def share(self) -> float:
        """The error as a share of its limit."""
        return self.error / self.limit

    @property
    def is_within(self) -> bool:
        """Whether rounding may explain the error."""
        return self.error <= self.limit


class PlainLogits:
    """Logits after each token of some sequences, from plain attention and without a cache.

    Raises ``ModelError`` if the model fails there.
    """

    def __init__(
        self, model: PreTrainedModel, hook: PagedAttentionHook, sequences: Sequence[tuple[int, ...]]
    ) -> None:
        self._model = model
        self._hook = hook
        self._sequences = sequences
        self._expected = self._run()
        self._moved: list[list[torch.Tensor]] = []

    def compare(self, sequence: int, token: int, actual: torch.Tensor) -> Comparison:
        """Compare ``actual``, float32 [vocabulary], with the logits after ``token``."""
        expected = self._expected[sequence][token]
        error = _relative_error(actual, expected)
        limit = _FLOOR[self._model.dtype]
        for seed in range(_NUM_MOVED):
            if error <= limit:
                break  # more runs can only raise it
            if seed == len(self._moved):
                self._moved.append(self._run(seed))
            noise = _relative_error(self._moved[seed][sequence][token], expected)
            limit = max(limit, min(_NOISE_FACTOR * noise, _MAX_LIMIT))
        return Comparison(error, limit)

    def _run(self, seed: int | None = None) -> list[torch.Tensor]:
        """Logits [tokens, vocabulary] of each sequence; ``seed``: with changed embeddings."""
        model = self._model
        model.set_attn_implementation("eager")
        try:
            with torch.inference_mode(), _moved_embeddings(model, seed):
                return [
                    model(input_ids=torch.tensor([tokens], device=model.device), use_cache=False).logits[0]
                    for tokens in self._sequences
                ]
        except Exception as error:  # any error of the model's code: there is no reference
            raise ModelError(
                f"{describe(model.config)} cannot be compared with plain transformers, where it "
                f"fails ({type(error).__name__}: {error}); --skip-parity-probe serves it anyway"
            ) from error
        finally:
            model.set_attn_implementation(self._hook.name)


@contextmanager
def _moved_embeddings(model: PreTrainedModel, seed: int | None) -> Iterator[None]:
    if seed is None:
        yield
        return
    generator = torch.Generator().manual_seed(seed)

    def move(_module: nn.Module, _inputs: object, x: torch.Tensor) -> torch.Tensor:
        steps = torch.randint(-1, 2, x.shape, generator=generator).to(x.device, x.dtype)
        return x + x * steps * (torch.finfo(x.dtype).eps / 2)

    handle = model.get_input_embeddings().register_forward_hook(move)
    try:
        yield
    finally:
        handle.remove()


def _relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Infinite if either is not a number."""
    scale = expected.float().abs().max().clamp_min(1e-6)
    error = float((actual.float() - expected.float()).abs().max() / scale)
    return math.inf if math.isnan(error) else error

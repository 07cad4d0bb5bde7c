"""How far rounding alone moves what plain transformers + PEFT answers in 16 bits.

A router that decides by a rounding makes a large error of a small one, also in a correct result. So
the control is plain transformers itself, with sums in other orders and embeddings that are moved by
one unit in the last place.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache

from .parity import HalfErrors, ParityCase

NUM_MOVED = 32
CHUNK_TOKENS = 23


@dataclass(frozen=True)
class RoundingErrors:
    """Mean errors against float32 truth, all at the same tokens of the same answers."""

    ours: float
    # Of plain transformers: alone, with other attention, in a batch, in chunks, with moved
    # embeddings.
    control: tuple[float, ...]
    without: float  # of plain transformers without what a test is about


def rounding_errors(
    case: ParityCase, outputs: list[Any], *, without: dict[str, Any], dtype: torch.dtype = torch.bfloat16
) -> RoundingErrors:
    """Errors of the base's answers, each with one choice of as many tokens.

    ``without``: values of the configuration that plain transformers must not come close with.
    """
    errors = HalfErrors(case, dtype)
    for output in outputs:
        errors.add_output(None, output)
    ours, alone = errors.means
    plain = _Plain(case, outputs, dtype)
    with torch.inference_mode():
        with plain.attention("sdpa"):
            other_attention = plain.error(plain.alone)
        control = [alone, other_attention, *map(plain.error, (plain.in_a_batch, plain.in_chunks))]
        control += plain.moved_errors()
        with plain.configured(without):
            return RoundingErrors(ours, tuple(control), plain.error(plain.alone))


class _Plain:
    """One model of plain transformers, run over all answers in several ways."""

    def __init__(self, case: ParityCase, outputs: list[Any], dtype: torch.dtype) -> None:
        self._model = case.model(None, dtype)
        self._rows: list[list[int]] = []
        self._ids: list[torch.Tensor] = []  # of the candidates: [tokens, candidates]
        self._truths: list[torch.Tensor] = []
        for output in outputs:
            (choice,) = output.outputs
            tokens = [*output.prompt_token_ids, *choice.token_ids]
            ids = torch.tensor([list(row) for row in choice.logprobs])
            truth = case.truth(None, tokens, len(output.prompt_token_ids), torch.float32)
            self._rows.append(tokens[:-1])
            self._ids.append(ids)
            self._truths.append(truth.gather(1, ids))
        self._count = len(outputs[0].outputs[0].token_ids)

    def error(self, run: Callable[[], list[torch.Tensor]]) -> float:
        """Mean error of ``run``, which returns logits [tokens, vocabulary] of each answer."""
        return float(torch.cat(self._errors(run())).mean())

    def moved_errors(self) -> list[float]:
        """Mean errors of runs with embeddings moved by one unit in the last place, or not."""
        generator = torch.Generator().manual_seed(0)
        logits = [self._run(inputs_embeds=self._moved(row, generator)) for row in self._rows]
        draws = zip(*(one.unbind() for one in logits), strict=True)
        return [float(torch.cat(self._errors(draw)).mean()) for draw in draws]

    def alone(self) -> list[torch.Tensor]:
        return [self._run(input_ids=torch.tensor([row]))[0] for row in self._rows]

    def in_a_batch(self) -> list[torch.Tensor]:
        """All answers in one pass, padded before their first tokens."""
        width = max(map(len, self._rows))
        ids = torch.tensor([[0] * (width - len(row)) + row for row in self._rows])
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in self._rows])
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        return list(self._run(input_ids=ids, attention_mask=mask, position_ids=positions))

    def in_chunks(self) -> list[torch.Tensor]:
        """Each answer by way of transformers' own cache."""
        return [self._run_chunks(row) for row in self._rows]

    @contextmanager
    def attention(self, name: str) -> Iterator[None]:
        """With another of transformers' own implementations of attention."""
        self._model.set_attn_implementation(name)
        try:
            yield
        finally:
            self._model.set_attn_implementation("eager")

    @contextmanager
    def configured(self, values: dict[str, Any]) -> Iterator[None]:
        """With other values in the configuration that passes look at."""
        config = self._model.config
        before = {name: getattr(config, name) for name in values}
        try:
            for name, value in values.items():
                setattr(config, name, value)
            yield
        finally:
            for name, value in before.items():
                setattr(config, name, value)

    def _errors(self, logits: Any) -> list[torch.Tensor]:
        found = (torch.log_softmax(one[-self._count :].float(), dim=-1) for one in logits)
        return [
            (one.gather(1, ids) - truth).abs()
            for one, ids, truth in zip(found, self._ids, self._truths, strict=True)
        ]

    def _run(self, **inputs: Any) -> torch.Tensor:
        """Logits [batch, tokens, vocabulary]."""
        logits: torch.Tensor = self._model(**inputs, use_cache=False).logits
        return logits

    def _run_chunks(self, row: list[int]) -> torch.Tensor:
        cache, logits = DynamicCache(config=self._model.config), []
        # Its name since transformers 5.24, and before.
        is_new = "cache" in inspect.signature(self._model.forward).parameters
        given = {"cache" if is_new else "past_key_values": cache}
        for start in range(0, len(row), CHUNK_TOKENS):
            chunk = torch.tensor([row[start : start + CHUNK_TOKENS]])
            out = self._model(input_ids=chunk, use_cache=True, **given)
            logits.append(out.logits[0])
        return torch.cat(logits)

    def _moved(self, row: list[int], generator: torch.Generator) -> torch.Tensor:
        """[draws, tokens, hidden]."""
        x = self._model.get_input_embeddings()(torch.tensor([row])).expand(NUM_MOVED, -1, -1)
        return torch.nextafter(x, x + torch.randint(-1, 2, x.shape, generator=generator))

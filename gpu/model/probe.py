"""The start-up parity probe: does this model work with packed rows and a paged pool?

There is no list of architectures: a short packed run through the engine's own path is compared with
the same modules under plain attention and a plain cache. Models that differ are refused with the
reason, because they would give wrong answers without an error.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from ...runtime.errors import ModelError
from .attention_hook import AttentionRecord, PagedAttentionHook
from .kv_pool import LayerKvShape
from .plain_logits import PlainLogits
from .source import describe

_PROMPT_LENGTHS = (7, 21)  # one within a block, one that crosses a block's end
_NUM_DECODE_STEPS = 2
NUM_PROBE_SEQUENCES = len(_PROMPT_LENGTHS)
MAX_PROBE_TOKENS = max(_PROMPT_LENGTHS) + _NUM_DECODE_STEPS  # per sequence
_NUM_DRAWS = 3  # of tokens; a fault shows in all draws, rounding in few


@dataclass(frozen=True, slots=True)
class ProbeRow:
    """One row of a probe step: ``token_ids`` follow ``start`` tokens already computed."""

    sequence: int
    start: int
    token_ids: tuple[int, ...]
    known_len: int | None = None  # known final number of tokens; None = these


# Runs one packed step; returns the logits [rows, vocabulary] of each row's last token.
PackedStep = Callable[[Sequence[ProbeRow]], torch.Tensor]


def record_attention(
    model: PreTrainedModel, hook: PagedAttentionHook, *, with_padding_mask: bool = False
) -> AttentionRecord:
    """Run a few tokens and record which layers call the attention interface.

    ``with_padding_mask``: pass a mask that marks no token as padding. Without it the model reads
    the values of positions, which do not exist on the meta device.

    Raises ``ModelError`` if not every layer does so exactly once.
    """
    config = model.config.get_text_config()
    tokens = torch.arange(5, device=model.device)[None] % config.vocab_size
    positions = torch.arange(5, device=model.device)[None]
    try:
        with hook.recording() as record, torch.inference_mode():
            mask = torch.ones_like(tokens) if with_padding_mask else None
            model(input_ids=tokens, position_ids=positions, attention_mask=mask, use_cache=False)
    except ModelError as error:
        raise ModelError(f"{describe(model.config)} cannot be served: {error}") from error
    except Exception as error:  # any error of the model's code: it cannot be served
        raise ModelError(
            f"{describe(model.config)} cannot be served: it fails on packed rows "
            f"without mask and cache ({type(error).__name__}: {error})"
        ) from error
    _check_calls(model.config, record, int(config.num_hidden_layers))
    _check_sights(model.config, record)
    return record


def layer_shapes(record: AttentionRecord) -> tuple[LayerKvShape, ...]:
    """Shapes of keys and values, by layer."""
    return tuple(record.shapes[layer] for layer in sorted(record.shapes))


def check_parity(model: PreTrainedModel, hook: PagedAttentionHook, step: PackedStep) -> float:
    """Compare the packed path with plain transformers; return the largest relative error.

    Raises ``ModelError`` on mismatch, with both the error and the limit of its position.
    """
    vocab_size = model.config.get_text_config().vocab_size
    for draw in range(_NUM_DRAWS):
        sequences = _probe_sequences(vocab_size, draw)
        actual = _run_packed(step, sequences)
        truth = PlainLogits(model, hook, sequences)
        found = [
            truth.compare(number, len(tokens) - len(ours) + i, logits)
            for number, (tokens, ours) in enumerate(zip(sequences, actual, strict=True))
            for i, logits in enumerate(ours)
        ]
        wrong = [one for one in found if not one.is_within]
        if not wrong:
            return max(one.error for one in found)
        if model.dtype == torch.float32:
            break
    worst = max(wrong, key=lambda one: one.share)
    raise ModelError(
        f"logits of {describe(model.config)} from packed rows differ from plain transformers "
        f"(relative error {worst.error:.2g}, limit {worst.limit:.2g}), so corun would answer "
        "wrongly; --skip-parity-probe serves it anyway"
    )


def _check_calls(config: Any, record: AttentionRecord, num_layers: int) -> None:
    calls = sorted(record.layer_indices)
    if calls == list(range(num_layers)):
        return
    if not calls:
        reason = "never calls transformers' attention interface"
    elif len(set(calls)) < len(calls):
        reason = f"calls attention more than once in a layer ({len(calls)} calls)"
    else:
        reason = (
            f"calls transformers' attention interface in {len(calls)} of {num_layers} layers; "
            "the other layers keep state outside the KV pool, or attend to something besides text"
        )
    raise ModelError(f"{describe(config)} cannot be served: it {reason}")


def _check_sights(config: Any, record: AttentionRecord) -> None:
    """Refuse windows and chunks that neither the mask nor the call states: they would be lost."""
    kinds = getattr(config.get_text_config(), "layer_types", None) or ()
    for layer, kind in enumerate(kinds):
        sight = record.sights[layer]
        is_lost = {"sliding_attention": sight.window is None, "chunked_attention": sight.chunk is None}.get(
            kind, False
        )
        if is_lost:
            raise ModelError(
                f"{describe(config)} cannot be served: layer {layer} is of type {kind}, but "
                "neither its mask nor its attention call has the size of the window or chunk"
            )


def _probe_sequences(vocab_size: int, draw: int) -> list[tuple[int, ...]]:
    """Fixed pseudo-random prompts with the tokens that follow them."""
    generator = torch.Generator().manual_seed(20 + draw)
    return [
        tuple(torch.randint(vocab_size, (n + _NUM_DECODE_STEPS,), generator=generator).tolist())
        for n in _PROMPT_LENGTHS
    ]


def _run_packed(step: PackedStep, sequences: Sequence[tuple[int, ...]]) -> list[list[torch.Tensor]]:
    """Prefill one prompt whole and the other in two chunks, then decode both."""
    first, second = _PROMPT_LENGTHS
    cut = second // 2
    logits: list[list[torch.Tensor]] = [[], []]
    out = step([ProbeRow(0, 0, sequences[0][:first]), ProbeRow(1, 0, sequences[1][:cut])])
    logits[0].append(out[0])
    out = step(
        [ProbeRow(0, first, sequences[0][first : first + 1]), ProbeRow(1, cut, sequences[1][cut:second])]
    )
    logits[0].append(out[0])
    logits[1].append(out[1])
    for i in range(_NUM_DECODE_STEPS):
        rows = [ProbeRow(1, second + i, sequences[1][second + i : second + i + 1])]
        if i + 1 < _NUM_DECODE_STEPS:
            at = first + i + 1
            rows.insert(0, ProbeRow(0, at, sequences[0][at : at + 1]))
        for row, value in zip(rows, step(rows), strict=True):
            logits[row.sequence].append(value)
    return logits

"""The start-up parity probe: may this model be served from packed rows and a paged pool?

No list of architectures: a short packed run through the engine's own path is compared with the
same modules under plain attention and a plain cache. What differs is refused by name and reason,
because it would otherwise answer wrongly without an error.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from ...runtime.errors import ModelError
from .attention_hook import AttentionRecord, PagedAttentionHook
from .kv_pool import LayerKvShape
from .source import describe

_PROMPT_LENGTHS = (7, 21)  # one within a block, one that crosses a block's end
_NUM_DECODE_STEPS = 2
NUM_PROBE_SEQUENCES = len(_PROMPT_LENGTHS)
MAX_PROBE_TOKENS = max(_PROMPT_LENGTHS) + _NUM_DECODE_STEPS  # per sequence
# Largest error allowed, relative to the largest reference logit of the position. In float32 any
# real difference is far above; half types are compared by the median position, because one routed
# expert that flips on rounding changes a position legitimately.
_MAX_RELATIVE_ERROR = {torch.float32: 1e-3, torch.bfloat16: 6e-2, torch.float16: 2e-2}


@dataclass(frozen=True, slots=True)
class ProbeRow:
    """One row of a probe step: ``token_ids`` follow ``start`` tokens already computed."""

    sequence: int
    start: int
    token_ids: tuple[int, ...]


# Runs one packed step; returns the logits [rows, vocabulary] of each row's last token.
PackedStep = Callable[[Sequence[ProbeRow]], torch.Tensor]


def record_attention(
    model: PreTrainedModel, hook: PagedAttentionHook, *, with_padding_mask: bool = False
) -> AttentionRecord:
    """Run a few tokens and see which layers call the attention interface.

    ``with_padding_mask``: say to the model that no token is padding. Without, it looks at the
    values of positions, which on the meta device there are none of.

    Raises ``ModelError`` if not every layer does so exactly once.
    """
    config = model.config.get_text_config()
    tokens = torch.arange(5, device=model.device)[None] % config.vocab_size
    positions = torch.arange(5, device=model.device)[None]
    try:
        with hook.recording() as record, torch.inference_mode():
            mask = torch.ones_like(tokens) if with_padding_mask else None
            model(
                input_ids=tokens, position_ids=positions, attention_mask=mask, use_cache=False
            )  # fmt: skip
    except ModelError as error:
        raise ModelError(f"{describe(model.config)} cannot be served: {error}") from error
    except Exception as error:  # foreign code: whatever it raises, the model cannot be served
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

    Raises ``ModelError`` on mismatch, with both the error and the limit.
    """
    sequences = _probe_sequences(model.config.get_text_config().vocab_size)
    actual = _run_packed(step, sequences)
    with torch.inference_mode():
        expected = [_run_plain(model, hook, sequence) for sequence in sequences]
    errors = torch.tensor(
        [
            _relative_error(a, e)
            for ours, theirs in zip(actual, expected, strict=True)
            for a, e in zip(ours, theirs, strict=True)
        ]
    )
    limit = _MAX_RELATIVE_ERROR[model.dtype]
    error = float(errors.max() if model.dtype == torch.float32 else errors.median())
    if not error <= limit:
        raise ModelError(
            f"{describe(model.config)} computes other logits from packed rows than on its own "
            f"(relative error {error:.2g}, limit {limit:.2g}), so corun would answer wrongly; "
            "--skip-parity-probe serves it all the same"
        )
    return error


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
            "the others keep state outside the KV pool, or attend to something other than text"
        )
    raise ModelError(f"{describe(config)} cannot be served: it {reason}")


def _check_sights(config: Any, record: AttentionRecord) -> None:
    """A window or chunk that neither mask nor call says would be lost."""
    kinds = getattr(config.get_text_config(), "layer_types", None) or ()
    for layer, kind in enumerate(kinds):
        sight = record.sights[layer]
        is_lost = {
            "sliding_attention": sight.window is None, "chunked_attention": sight.chunk is None,
        }.get(kind, False)  # fmt: skip
        if is_lost:
            raise ModelError(
                f"{describe(config)} cannot be served: layer {layer} is of type {kind} but "
                "neither its mask nor its attention call says of what size"
            )


def _probe_sequences(vocab_size: int) -> list[tuple[int, ...]]:
    """Fixed pseudo-random prompts with the tokens that follow them."""
    generator = torch.Generator().manual_seed(20)
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
        [ProbeRow(0, first, sequences[0][first : first + 1]),
         ProbeRow(1, cut, sequences[1][cut:second])]
    )  # fmt: skip
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


def _run_plain(
    model: PreTrainedModel, hook: PagedAttentionHook, sequence: tuple[int, ...]
) -> list[torch.Tensor]:
    """Prefill and decode one sequence with plain attention and a plain cache."""
    model.set_attn_implementation("eager")
    try:
        cache = DynamicCache(config=model.config)
        num_prompt = len(sequence) - _NUM_DECODE_STEPS
        tokens = torch.tensor(sequence, device=model.device)[None]
        out = model(input_ids=tokens[:, :num_prompt], past_key_values=cache, use_cache=True)
        logits = [out.logits[0, -1]]
        for i in range(num_prompt, len(sequence)):
            out = model(input_ids=tokens[:, i : i + 1], past_key_values=cache, use_cache=True)
            logits.append(out.logits[0, -1])
        return logits
    finally:
        model.set_attn_implementation(hook.name)


def _relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    scale = expected.float().abs().max().clamp_min(1e-6)
    return float((actual.float() - expected.float()).abs().max() / scale)

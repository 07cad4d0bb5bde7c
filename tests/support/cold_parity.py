"""Cold requests held to transformers + PEFT: the model, its adapters, and the judgement."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from corun.runtime.scheduler.cold import ColdChunk
from support.cold_engine import Answer, Chunks, ColdEngine
from support.model_profiles import Figures
from support.parity import ADAPTER_SPECS, VOCAB_SIZE, AdapterSpec, HalfErrors, ParityCase

MAX_TIE = 0.5  # nats: nearer than that to the best, a token may be drawn instead in bfloat16
NUM_LAYERS = 4
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
ATTENTION_SPEC = AdapterSpec("attention", {"r": 16, "target_modules": list(ATTENTION)})
LARGE_SPEC = AdapterSpec("large", {"r": 256, "lora_alpha": 128})
# What PEFT does by default, and the rest of what it leaves to adapters: targets in each input group
# of which some are missing, or all of them.
PARTIAL_SPECS = (
    AdapterSpec("query and value", {"r": 8, "target_modules": ["q_proj", "v_proj"]}),
    AdapterSpec("mlp", {"r": 16, "target_modules": ["gate_proj", "up_proj", "down_proj"]}),
    AdapterSpec("up alone", {"r": 5, "target_modules": ["up_proj"]}),
    AdapterSpec("one layer", {"r": 8, "layers_to_transform": [2]}),
)
NAMES = tuple(spec.name for spec in (*ADAPTER_SPECS, ATTENTION_SPEC))


def make_case(
    directory: Path,
    specs: Sequence[AdapterSpec] = (*ADAPTER_SPECS, ATTENTION_SPEC, LARGE_SPEC),
    quantization: str | None = None,
) -> ParityCase:
    """Adapters on all linears, on some, in one layer, with a pattern of ranks, and a large one."""
    return ParityCase("llama-deep", directory, seed=3, specs=specs, quantization=quantization)


def prompts(count: int, seed: int = 0, num_tokens: int = 24) -> list[list[int]]:
    """Random ones, of at most ``num_tokens``."""
    rng = random.Random(seed)
    lengths = [rng.randint(num_tokens // 2, num_tokens) for _ in range(count)]
    return [[rng.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in lengths]


def check(case: ParityCase, answers: Sequence[Answer]) -> None:
    """All are complete, as near to the truth as PEFT is, and greedy up to near-ties."""
    errors = HalfErrors(case)
    for answer in answers:
        assert (answer.finish_reason, answer.error) == ("length", None), answer
        errors.add(answer.adapter, answer.prompt, answer.token_ids, answer.candidates)
        tokens, first = [*answer.prompt, *answer.token_ids], len(answer.prompt)
        truth = case.truth(answer.adapter, tokens, first, torch.float32)
        drawn = truth[range(len(answer.token_ids)), answer.token_ids]
        assert float((truth.max(dim=1).values - drawn).max()) <= MAX_TIE, answer
    errors.check()


def check_cold_starts(
    case: ParityCase, model: Path, directory: Path, *, split_layer: int = 2, **options: Any
) -> None:
    """Requests of all adapters but one begin cold, by workers and by the device; all are judged.

    model: the case's, in the form that is served.
    """
    options = {"figures": Figures(link_bytes_per_s=1e6), "delta_backend": "numpy", **options}
    with ColdEngine(model, case.adapters, directory, **options) as engine:
        engine.warm("rs")
        names = [*NAMES, None]
        with engine.chunks(split_at(split_layer)):
            for name, prompt in zip(names, prompts(len(names)), strict=True):
                engine.ask(name, prompt)
            answers = engine.run()
        check(case, answers)
        assert engine.assisted
        engine.check_nothing_is_held()


def split_at(layer: int, num_tokens: int = 512) -> Chunks:
    """Every chunk of at most ``num_tokens``, all with the same split; without workers on retry."""
    return lambda request, max_tokens: ColdChunk(
        min(max_tokens, num_tokens), 0 if request.retried_positions else layer
    )

"""Reads the arguments of ``Engine.generate``: one or many of each, into one item per prompt.

Pure. Knows nothing of tokens or of the engine.
"""

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import SupportsIndex, TypeVar

from ..errors import RequestError
from ..sampling import SamplingParams
from .inputs import Prompt
from .lora_directory import check_lora_request
from .outputs import LoRARequest

_Item = TypeVar("_Item")


@dataclass(frozen=True, slots=True)
class BatchItem:
    """One prompt and what goes with it."""

    prompt: Prompt
    sampling_params: SamplingParams
    lora_request: LoRARequest | str | None


def read_batch(
    prompts: Prompt | Sequence[Prompt],
    sampling_params: SamplingParams | Sequence[SamplingParams],
    lora_request: LoRARequest | str | Sequence[LoRARequest | str | None] | None,
) -> list[BatchItem]:
    """Return one item per prompt. Raises ``RequestError`` for wrong types or numbers."""
    texts = _read_prompts(prompts)
    params: Sequence[SamplingParams]
    if isinstance(sampling_params, SamplingParams):
        params = [sampling_params] * len(texts)
    else:
        params = _one_per_prompt("sampling_params", sampling_params, len(texts))
    loras: Sequence[LoRARequest | str | None]
    if lora_request is None or isinstance(lora_request, str | LoRARequest):
        loras = [lora_request] * len(texts)
    else:
        loras = _one_per_prompt("lora_request", lora_request, len(texts))
    for item in params:
        if not isinstance(item, SamplingParams):
            raise RequestError(
                f"sampling_params has {item!r}, expected SamplingParams", param="sampling_params"
            )
    for lora in loras:
        if lora is not None and not isinstance(lora, str):
            check_lora_request(lora)
    return [BatchItem(*columns) for columns in zip(texts, params, loras, strict=True)]


def _read_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Tell one prompt from several: a list of integers is one prompt."""
    if isinstance(prompts, str):
        return [prompts]
    read: list[Prompt] = []
    for prompt in prompts:
        if isinstance(prompt, SupportsIndex):
            return [[_token_id(token_id) for token_id in prompts]]
        read.append(prompt if isinstance(prompt, str) else list(prompt))
    return read


def _token_id(value: object) -> int:
    if not isinstance(value, SupportsIndex):
        raise RequestError(
            f"the prompts mix token ids with {value!r}; give a list of prompts or one prompt",
            param="prompt",
        )
    return operator.index(value)


def _one_per_prompt(name: str, values: Sequence[_Item], num_prompts: int) -> Sequence[_Item]:
    if len(values) != num_prompts:
        raise RequestError(
            f"{name} has {len(values)} entries for {num_prompts} prompts; "
            "give one for all or one per prompt",
            param=name,
        )
    return values

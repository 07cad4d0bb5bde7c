"""From what a caller asks to engine requests: checks, defaults and limits. Pure.

Knows the model's facts and the limits; knows nothing of the engine that will compute.
"""

import dataclasses
import hashlib
import random
from collections.abc import Iterator, Sequence
from typing import Any

from ..config.engine import EngineConfig
from ..engine.messages import AddRequest, ModelInfo
from ..errors import OverloadedError, RequestError
from ..sampling import SamplingParams
from .outputs import LoRARequest
from .tokenizer import check_token_ids

Prompt = str | Sequence[int]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a caller asks, as its outputs repeat it."""

    request_id: str
    prompt: str | None  # None if it was given as token ids
    prompt_token_ids: list[int]
    params: SamplingParams
    lora_request: LoRARequest | str | None
    cache_salt: str = ""

    @property
    def adapter_name(self) -> str | None:
        """The adapter's name, None for the base model."""
        lora = self.lora_request
        return lora.lora_name if isinstance(lora, LoRARequest) else lora


def make_config(config: EngineConfig | None, options: dict[str, Any]) -> EngineConfig:
    """Return ``config``, or one made of ``options``; giving both is an error of the caller."""
    if config is None:
        return EngineConfig(**options)
    if options:
        raise TypeError(f"give a config or options, not both: {', '.join(sorted(options))}")
    return config


def check_prompt(token_ids: Sequence[int], model: ModelInfo) -> list[int]:
    """Return the prompt's tokens; raises ``RequestError`` if they cannot be computed."""
    if len(token_ids) == 0:
        raise RequestError("the prompt is empty: it has no tokens", param="prompt")
    if len(token_ids) >= model.max_model_len:
        raise RequestError(
            f"the prompt has {len(token_ids)} tokens; with room for one more the limit is "
            f"{model.max_model_len - 1}, as the context has {model.max_model_len} "
            "(--max-model-len)",
            param="prompt",
        )
    return check_token_ids(token_ids, vocab_size=model.vocab_size)


def check_room(num_open: int, num_new: int, config: EngineConfig) -> None:
    """Raise ``OverloadedError`` for what cannot even wait, before the engine has to hear of it."""
    limit = config.max_num_seqs + config.max_num_waiting
    if num_open + num_new > limit:
        raise OverloadedError(
            f"{num_open} requests are open and {num_new} more would exceed {limit}: "
            f"{config.max_num_seqs} running (--max-num-seqs) "
            f"and {config.max_num_waiting} waiting (--max-num-waiting)"
        )


def default_sampling(model: ModelInfo) -> SamplingParams:
    """Return what applies to a request that says nothing: the model's own defaults.

    They come from the model's ``generation_config.json``.
    """
    stated: dict[str, Any] = dict(model.default_sampling)
    if "top_k" in stated:
        stated["top_k"] = int(stated["top_k"])
    return SamplingParams(**stated)


def engine_requests(
    asked: Asked, engine_ids: Iterator[int], model: ModelInfo, rng: random.Random
) -> list[AddRequest]:
    """Return one engine request per choice, with ids drawn from ``engine_ids``."""
    prompt = tuple(asked.prompt_token_ids)
    samplings = engine_sampling(
        asked.params, num_prompt_tokens=len(prompt), max_model_len=model.max_model_len, rng=rng
    )
    return [
        AddRequest(next(engine_ids), prompt, sampling, asked.adapter_name, asked.cache_salt)
        for sampling in samplings
    ]


def engine_sampling(
    params: SamplingParams, *, num_prompt_tokens: int, max_model_len: int, rng: random.Random
) -> list[SamplingParams]:
    """Return what each choice asks of the engine: one choice, a seed and a number of tokens.

    ``max_tokens`` is cut to what the context still takes; None means just that. Stop strings stay
    behind: they are a matter of text.
    """
    room = max_model_len - num_prompt_tokens
    max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
    if params.min_tokens > max_tokens:
        raise RequestError(
            f"min_tokens is {params.min_tokens}, but after {num_prompt_tokens} tokens of prompt "
            f"only {max_tokens} fit into the context of {max_model_len} (--max-model-len)",
            param="min_tokens",
        )
    seed = rng.getrandbits(63) if params.seed is None else params.seed
    return [
        dataclasses.replace(
            params, n=1, seed=choice_seed(seed, index), max_tokens=max_tokens, stop=()
        )
        for index in range(params.n)
    ]


def choice_seed(seed: int, index: int) -> int:
    """Return the seed of choice ``index``: the first one has ``seed`` itself."""
    if index == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1

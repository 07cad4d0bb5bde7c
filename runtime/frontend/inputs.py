"""Turns a caller's request into engine requests: checks, defaults and limits. Pure.

Knows the model's facts, the limits, and a copy of the engine's registry of adapters, in which HTTP
and Python look names up before they call the engine. The engine decides, as the copy is as old as
its last message.
"""

import dataclasses
import hashlib
import itertools
import operator
import os
import random
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, SupportsIndex, TypeVar

from ..adapters.info import AdapterInfo
from ..adapters.mix import LoRAMix
from ..adapters.names import DRAINING, FAILED, READY, unavailable_adapter, unknown_name
from ..config.engine import EngineConfig
from ..engine.loop import OwnPolicies
from ..engine.messages import AddRequest, ModelInfo
from ..errors import RequestError
from ..limits import TextLimit, check_num_biases, check_num_ids, check_prompt_length, prompt_limit
from ..sampling import SamplingParams
from .outputs import LoRARequest
from .tokenizer import Tokenizer, check_token_ids


class LoraDirectory:
    """Adapters by name."""

    def __init__(self, infos: Iterable[AdapterInfo] = ()) -> None:
        self._infos = {info.name: info for info in infos}

    def update(self, changed: Iterable[AdapterInfo], removed: Iterable[str] = ()) -> None:
        """Apply changes that the engine has published."""
        for name in removed:
            self._infos.pop(name, None)
        self._infos.update({info.name: info for info in changed})

    def get(self, name: str) -> AdapterInfo | None:
        """Return an adapter in any state, or None."""
        return self._infos.get(name)

    def list(self) -> list[AdapterInfo]:
        return sorted(self._infos.values(), key=lambda info: info.name)

    def ready_path(self, name: str) -> str | None:
        """Return the path of an adapter that is ready, or None."""
        info = self._infos.get(name)
        return None if info is None or info.state != READY else info.path

    def __contains__(self, name: object) -> bool:
        """Whether an adapter in any state has this name."""
        return name in self._infos

    def check_known(self, name: str, *, param: str = "lora_request") -> None:
        """Raise ``UnknownModelError`` unless an adapter in any state has this name."""
        if name not in self._infos:
            raise unknown_name(name, self._infos, param=param)

    def check_usable(self, name: str, *, param: str = "lora_request") -> None:
        """Raise ``UnknownModelError`` or ``AdapterUnavailableError`` unless requests can use it.

        An adapter that is loading can be used: the engine knows whether it still loads.
        """
        self.check_known(name, param=param)
        info = self._infos[name]
        if info.state in (FAILED, DRAINING):
            raise unavailable_adapter(name, info.state, info.reason, param=param)


def adapter_path(lora: LoRARequest) -> str:
    """Return an adapter's path as the engine needs it, in any working directory."""
    return os.path.abspath(os.path.expanduser(lora.lora_path))


def check_lora_request(lora: object) -> LoRARequest:
    """Return ``lora``; raises ``RequestError`` for another type, or without name or path."""
    if not isinstance(lora, LoRARequest):
        raise RequestError(
            f"lora_request is {lora!r}, expected a LoRARequest, a LoRAMix, an adapter's name or None",
            param="lora_request",
        )
    if not lora.lora_name or not lora.lora_path:
        raise RequestError("a LoRARequest needs a name and a path", param="lora_request")
    return lora


Prompt = str | Sequence[int]
Lora = LoRARequest | LoRAMix | str | None
_Item = TypeVar("_Item")

_POLICIES = ("scheduling_policy", "memory_policy")


@dataclasses.dataclass(frozen=True, slots=True)
class MadePrompt:
    """A prompt that was made by an adapter's conventions, and how its answers are sampled."""

    token_ids: list[int]
    params: SamplingParams


@dataclasses.dataclass(frozen=True, slots=True)
class BatchItem:
    """One prompt of a batch with its parameters."""

    prompt: Prompt
    sampling_params: SamplingParams
    lora_request: Lora


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRequest:
    """A caller's request, checked: the fields that outputs repeat, and those for the engine."""

    request_id: str
    prompt: str | None  # None if it was given as token ids
    prompt_token_ids: list[int]
    params: SamplingParams
    samplings: Sequence[SamplingParams]  # for the engine, one per choice
    lora_request: Lora
    tokenizer: Tokenizer  # decodes the output
    cache_salt: str = ""
    predicted_output_tokens: int | None = None  # of each choice; None = the engine predicts
    conventions: str | None = None  # digest of the adapter's; None = the base model
    waited_s: float = 0.0  # seconds waited for the adapter's files

    def engine_requests(self, engine_ids: Iterator[int]) -> list[AddRequest]:
        """Return one engine request per choice, with ids drawn from ``engine_ids``."""
        adapter_name = lora_name_of(self.lora_request)
        prompt = tuple(self.prompt_token_ids)
        return [
            AddRequest(
                next(engine_ids),
                prompt,
                sampling,
                adapter_name,
                self.cache_salt,
                self.predicted_output_tokens,
                self.request_id,
                self.conventions,
                self.waited_s,
            )
            for sampling in self.samplings
        ]


def lora_name_of(lora: Lora) -> str | None:
    """Return the engine's name of an adapter or a mix; None = the base model."""
    return lora if lora is None or isinstance(lora, str) else lora.lora_name


def read_options(
    config: EngineConfig | None, options: dict[str, Any]
) -> tuple[EngineConfig, OwnPolicies | None]:
    """Return ``config``, or one made of ``options``. Raises ``TypeError`` for both.

    Policies given as objects are returned separately, as a configuration cannot hold them.
    """
    own = {name: options[name] for name in _POLICIES if callable(options.get(name))}
    options = {name: value for name, value in options.items() if name not in own}
    own_policies = None
    if own:
        own_policies = OwnPolicies(own.get("scheduling_policy"), own.get("memory_policy"))
    if config is None:
        return EngineConfig(**options), own_policies
    if options:
        raise TypeError(f"give a config or options, not both: {', '.join(sorted(options))}")
    return config, own_policies


def check_prompt(token_ids: Sequence[int], max_model_len: int, vocab_size: int) -> list[int]:
    """Return the prompt's tokens; raises ``RequestError`` if they are invalid."""
    check_prompt_length(len(token_ids), max_model_len)
    return check_token_ids(token_ids, vocab_size=vocab_size)


def truncate_prompt(token_ids: Sequence[int], params: SamplingParams, max_model_len: int) -> Sequence[int]:
    """Return the last tokens of a prompt, as many as ``params`` keeps."""
    num_kept = _num_kept(params, max_model_len)
    return token_ids if num_kept is None else token_ids[-num_kept:]


def text_limit(params: SamplingParams, max_model_len: int) -> TextLimit:
    """Return the limit of a prompt that is text, see ``truncate_prompt``."""
    return prompt_limit(max_model_len, _num_kept(params, max_model_len))


def _num_kept(params: SamplingParams, max_model_len: int) -> int | None:
    num_kept = params.truncate_prompt_tokens
    return max(1, max_model_len - (params.max_tokens or 1)) if num_kept == -1 else num_kept


def check_token_rules(params: SamplingParams, vocab_size: int, max_logit_bias: int) -> None:
    """Raise ``RequestError`` for unknown tokens, or for too many of them."""
    biases = params.logit_bias or {}
    check_num_biases(len(biases), max_logit_bias)
    listed = {"allowed_token_ids": params.allowed_token_ids or (), "stop_token_ids": params.stop_token_ids}
    for name, listed_ids in listed.items():
        check_num_ids(name, len(listed_ids), vocab_size)
    named: dict[str, Iterable[int]] = {
        "logit_bias": biases,
        "allowed_token_ids": params.allowed_token_ids or (),
        "bad_words_ids": itertools.chain.from_iterable(params.bad_words_ids),
    }
    for name, token_ids in named.items():
        largest = max(token_ids, default=0)
        if largest >= vocab_size:
            raise RequestError(f"{name} names token {largest}, the vocabulary has {vocab_size}", param=name)


async def bad_words_ids(words: Iterable[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Return the tokens of words, with and without a space before (most tokenizers differ)."""
    variants = [
        tuple(await tokenizer.encode_async(text, add_special_tokens=False))
        for word in words
        for text in (word, " " + word.lstrip())
    ]
    return tuple(dict.fromkeys(ids for ids in variants if ids))


def default_sampling(model: ModelInfo) -> SamplingParams:
    """Return the model's own defaults, for a request without parameters.

    They come from the model's ``generation_config.json``.
    """
    stated: dict[str, Any] = dict(model.default_sampling)
    if "top_k" in stated:
        stated["top_k"] = int(stated["top_k"])
    return SamplingParams(**stated)


def engine_sampling(
    params: SamplingParams, *, num_prompt_tokens: int, max_model_len: int, rng: random.Random
) -> list[SamplingParams]:
    """Return the engine's parameters of each choice: ``n`` 1, with a seed and ``max_tokens``.

    ``max_tokens`` is limited to the room left in the context; None means all of it. For 0 the
    engine computes one token, which the front end drops. Stop strings and
    ``truncate_prompt_tokens`` are not passed on, as the front end handles them.
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
            params,
            n=1,
            seed=choice_seed(seed, index),
            max_tokens=max(1, max_tokens),
            stop=(),
            bad_words=(),
            prompt_logprobs=params.prompt_logprobs if index == 0 else None,  # one for all
            truncate_prompt_tokens=None,
        )
        for index in range(params.n)
    ]


def choice_seed(seed: int, index: int) -> int:
    """Return the seed of choice ``index``: the first one has ``seed`` itself."""
    if index == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def read_batch(
    prompts: Prompt | Sequence[Prompt],
    sampling_params: SamplingParams | Sequence[SamplingParams],
    lora_request: Lora | Sequence[Lora],
) -> list[BatchItem]:
    """Return one item per prompt. Raises ``RequestError`` for wrong types or lengths."""
    texts = _read_prompts(prompts)
    params: Sequence[SamplingParams]
    if isinstance(sampling_params, SamplingParams):
        params = [sampling_params] * len(texts)
    else:
        params = _one_per_prompt("sampling_params", sampling_params, len(texts))
    loras: Sequence[Lora]
    if lora_request is None or isinstance(lora_request, str | LoRARequest | LoRAMix):
        loras = [lora_request] * len(texts)
    else:
        loras = _one_per_prompt("lora_request", lora_request, len(texts))
    for item in params:
        if not isinstance(item, SamplingParams):
            raise RequestError(
                f"sampling_params has {item!r}, expected SamplingParams", param="sampling_params"
            )
    for lora in loras:
        if lora is not None and not isinstance(lora, str | LoRAMix):
            check_lora_request(lora)
    return [BatchItem(*columns) for columns in zip(texts, params, loras, strict=True)]


def _read_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return the list of prompts; a list of integers is one prompt."""
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
            f"the prompts mix token ids with {value!r}; give one prompt or a list of prompts", param="prompt"
        )
    return operator.index(value)


def _one_per_prompt(name: str, values: Sequence[_Item], num_prompts: int) -> Sequence[_Item]:
    if len(values) != num_prompts:
        raise RequestError(
            f"{name} has {len(values)} entries for {num_prompts} prompts; give one for all or one per prompt",
            param=name,
        )
    return values

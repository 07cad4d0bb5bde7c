"""From what a caller asks to engine requests: checks, defaults and limits. Pure.

Knows the model's facts and the limits; knows nothing of the engine that will compute.
"""

import dataclasses
import hashlib
import random
from collections.abc import Sequence

from ..engine.messages import ModelInfo
from ..errors import RequestError
from ..sampling import SamplingParams
from .tokenizer import check_token_ids

Prompt = str | Sequence[int]


def check_prompt(token_ids: Sequence[int], model: ModelInfo) -> list[int]:
    """Return the prompt's tokens; raises ``RequestError`` if they cannot be computed."""
    if not token_ids:
        raise RequestError("the prompt is empty: it has no tokens", param="prompt")
    if len(token_ids) >= model.max_model_len:
        raise RequestError(
            f"the prompt has {len(token_ids)} tokens; with room for one more the limit is "
            f"{model.max_model_len - 1}, as the context has {model.max_model_len} "
            "(--max-model-len)",
            param="prompt",
        )
    return check_token_ids(token_ids, vocab_size=model.vocab_size)


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

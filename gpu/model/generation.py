"""Reads end tokens and default sampling from a model's generation_config.json."""

import logging
from dataclasses import dataclass
from typing import Any

from ...runtime.errors import ModelError, RequestError
from ...runtime.sampling import SamplingParams
from .source import ModelSource, load_generation_config

_LOG = logging.getLogger(__name__)

_SAMPLING_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")

# Settings of transformers' generate that corun does not apply, with the neutral value of each.
_NOT_APPLIED: dict[str, object] = {
    "bad_words_ids": None,
    "begin_suppress_tokens": None,
    "constraints": None,
    "dola_layers": None,
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "exponential_decay_length_penalty": None,
    "force_words_ids": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "guidance_scale": 1.0,
    "max_new_tokens": None,
    "min_length": 0,
    "min_new_tokens": 0,
    "no_repeat_ngram_size": 0,
    "num_beams": 1,
    "penalty_alpha": 0.0,
    "sequence_bias": None,
    "stop_strings": None,
    "suppress_tokens": None,
    "token_healing": False,
    "top_h": None,
    "typical_p": 1.0,
    "watermarking_config": None,
}


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """Defaults for requests that do not set a value."""

    eos_token_ids: tuple[int, ...]
    sampling: dict[str, float]  # only values set in the file


def read_generation_defaults(
    source: ModelSource, config: Any, tokenizer_eos_id: int | None
) -> GenerationDefaults:
    """Read the defaults of a model; its tokenizer may define its own end token.

    Only values that the file states count, not the library's own defaults; ``do_sample: false``
    means temperature 0. Values that no request may have are skipped with a warning. Another warning
    names values that would change answers and are not applied. Raises ``ModelError`` if the file
    cannot be read.
    """
    generation = load_generation_config(source, config)
    stated = generation.to_diff_dict()
    sampling = {name: stated[name] for name in _SAMPLING_FIELDS if _is_usable(name, stated, source)}
    if stated.get("do_sample") is False:
        sampling["temperature"] = 0.0
    _warn_of_unapplied(stated, source)
    eos = generation.eos_token_id
    if eos is None:
        eos = getattr(config, "eos_token_id", None)
    ids = eos if isinstance(eos, list | tuple) else () if eos is None else (eos,)
    if not all(isinstance(token, int) for token in ids):
        raise ModelError(f"eos_token_id of {source.path!r} is {eos!r}, not a token id or a list")
    if tokenizer_eos_id is not None:
        ids = (*ids, tokenizer_eos_id)
    return GenerationDefaults(tuple(dict.fromkeys(ids)), sampling)


def _is_usable(name: str, stated: dict[str, Any], source: ModelSource) -> bool:
    """Whether a stated default is valid for requests; an invalid one would refuse every request."""
    if stated.get(name) is None:
        return False
    try:
        SamplingParams(**{name: stated[name]})
    except (RequestError, TypeError) as error:
        _LOG.warning("generation_config.json of %s: %s; the value is ignored", source.path, error)
        return False
    return True


def _warn_of_unapplied(stated: dict[str, Any], source: ModelSource) -> None:
    names = [
        name for name, neutral in _NOT_APPLIED.items() if stated.get(name) not in (None, neutral, [], {})
    ]
    if names:
        _LOG.warning(
            "generation_config.json of %s: corun does not apply %s; answers can differ from those "
            "of transformers' generate. Requests can set stop, min_tokens, max_tokens and "
            "logit_bias",
            source.path,
            ", ".join(names),
        )

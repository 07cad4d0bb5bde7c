"""What a model's generation_config.json says of end tokens and default sampling."""

import logging
from dataclasses import dataclass
from typing import Any

from ...runtime.errors import ModelError, RequestError
from ...runtime.sampling import SamplingParams
from .source import ModelSource, load_generation_config

_LOG = logging.getLogger(__name__)

_SAMPLING_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """Defaults for requests that do not say otherwise."""

    eos_token_ids: tuple[int, ...]
    sampling: dict[str, float]  # only what the model's author set


def read_generation_defaults(
    source: ModelSource, config: Any, tokenizer_eos_id: int | None
) -> GenerationDefaults:
    """Read the defaults of a model, whose tokenizer names an end token of its own, if any.

    Only values that the file states count, because the library's own defaults are nobody's choice;
    ``do_sample: false`` stands for temperature 0. Values that no request may have are left out with
    a warning. Raises ``ModelError`` if the file cannot be read.
    """
    generation = load_generation_config(source, config)
    stated = generation.to_diff_dict()
    sampling = {name: stated[name] for name in _SAMPLING_FIELDS if _is_usable(name, stated, source)}
    if stated.get("do_sample") is False:
        sampling["temperature"] = 0.0
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
    """Whether a default is stated that requests may ask for; others would refuse every request."""
    if stated.get(name) is None:
        return False
    try:
        SamplingParams(**{name: stated[name]})
    except (RequestError, TypeError) as error:
        _LOG.warning("generation_config.json of %s: %s; it is left out", source.path, error)
        return False
    return True

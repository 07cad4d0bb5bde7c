"""What a model's generation_config.json says of end tokens and default sampling."""

from dataclasses import dataclass
from typing import Any

from .load import ModelSource, load_generation_config

_SAMPLING_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """Defaults for requests that do not say otherwise."""

    eos_token_ids: tuple[int, ...]
    sampling: dict[str, float]  # only what the model's author set


def read_generation_defaults(source: ModelSource, config: Any) -> GenerationDefaults:
    """Read the defaults of a model.

    Only values that the file states count, because the library's own defaults are nobody's choice;
    ``do_sample: false`` stands for temperature 0.
    """
    generation = load_generation_config(source, config)
    stated = generation.to_diff_dict()
    sampling = {name: stated[name] for name in _SAMPLING_FIELDS if stated.get(name) is not None}
    if stated.get("do_sample") is False:
        sampling["temperature"] = 0.0
    eos = generation.eos_token_id if generation.eos_token_id is not None else config.eos_token_id
    ids = eos if isinstance(eos, list | tuple) else () if eos is None else (eos,)
    return GenerationDefaults(tuple(int(token) for token in ids), sampling)

"""From the fields of a request and the model's defaults to ``SamplingParams``. Pure."""

from collections.abc import Mapping
from typing import Any

from ..errors import RequestError
from ..sampling import SamplingParams
from .errors import HttpError
from .fields import GenerationFields

_DIRECT = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "n",
    "min_tokens",
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)
_FROM_MODEL = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_INTEGERS = ("top_k",)


def to_sampling_params(
    body: GenerationFields,
    model_defaults: Mapping[str, float],
    *,
    default_max_tokens: int | None,
    logprobs: int | None,
    logprobs_field: str,
) -> SamplingParams:
    """Combine what the request gives with ``model_defaults`` (from generation_config.json).

    ``default_max_tokens`` None means as many as the context takes. Raises ``RequestError`` whose
    ``param`` is the request's own field name.
    """
    values: dict[str, Any] = {
        name: int(model_defaults[name]) if name in _INTEGERS else model_defaults[name]
        for name in _FROM_MODEL
        if name in model_defaults
    }
    for name in _DIRECT:
        given = getattr(body, name)
        if given is not None:
            values[name] = given
    max_tokens, max_tokens_field = _max_tokens(body)
    values["max_tokens"] = default_max_tokens if max_tokens is None else max_tokens
    values["logprobs"] = logprobs
    values["stop"] = body.stop
    values["stop_token_ids"] = body.stop_token_ids or ()
    try:
        return SamplingParams(**values)
    except RequestError as exc:
        raise _renamed(exc, {"max_tokens": max_tokens_field, "logprobs": logprobs_field}) from None


def _max_tokens(body: GenerationFields) -> tuple[int | None, str]:
    """Return the limit and the name under which the request gave it."""
    old, new = body.max_tokens, body.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise HttpError(
            400,
            f"max_tokens ({old}) and max_completion_tokens ({new}) differ; give one of them",
            code="invalid_value",
            param="max_completion_tokens",
        )
    return (old, "max_tokens") if new is None else (new, "max_completion_tokens")


def _renamed(exc: RequestError, names: Mapping[str, str]) -> RequestError:
    """Return ``exc`` about the field as the request spelt it."""
    name = names.get(exc.param or "")
    if name is None or name == exc.param:
        return exc
    return RequestError(str(exc).replace(str(exc.param), name, 1), param=name)

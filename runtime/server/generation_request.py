"""What completions and chat completions have in common: a body's fields, and the parsed request."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BeforeValidator

from ..errors import RequestError
from ..sampling import SamplingParams
from .body import RequestModel, wrong_type
from .errors import HttpError
from .responses import Envelope

Prompt = str | list[int]

# Fields that SamplingParams has under the same name.
_SAMPLING_FIELDS = (
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


def _check_stop(value: object) -> object:
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise wrong_type("stop", value, "a string or a list of strings")
    for index, item in enumerate(value):
        if not isinstance(item, str):
            raise wrong_type(f"stop[{index}]", item, "a string")
    return value


StopField = Annotated[str | list[str] | None, BeforeValidator(_check_stop)]


class StreamOptions(RequestModel):
    """How a stream reports on itself."""

    include_usage: bool | None = None


class GenerationFields(RequestModel):
    """What both endpoints accept; null always means "not given"."""

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    n: int | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    min_tokens: int | None = None
    stop: StopField = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None
    predicted_output_tokens: int | None = None
    return_timing: bool | None = None
    user: str | None = None  # accepted for compatibility; nothing depends on it
    safety_identifier: str | None = None  # likewise
    prompt_cache_key: str | None = None  # likewise: a hint for routing between servers

    def check_stream_options(self) -> None:
        """Raise ``HttpError`` for stream options without a stream."""
        if self.stream_options is not None and not self.stream:
            raise HttpError(
                400,
                "stream_options is given but stream is not true",
                code="invalid_value",
                param="stream_options",
            )

    @property
    def wants_stream_usage(self) -> bool:
        """Whether the stream ends with a chunk of token counts."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def sampling_params(
        self,
        model_defaults: Mapping[str, float],
        *,
        default_max_tokens: int | None,
        logprobs: int | None,
        logprobs_field: str,
    ) -> SamplingParams:
        """Combine what the request gives with ``model_defaults`` (from generation_config.json).

        ``default_max_tokens`` None means as many as the context takes. Raises ``RequestError``
        whose ``param`` is the request's own field name.
        """
        values: dict[str, Any] = {
            name: int(model_defaults[name]) if name in _INTEGERS else model_defaults[name]
            for name in _FROM_MODEL
            if name in model_defaults
        }
        for name in _SAMPLING_FIELDS:
            given = getattr(self, name)
            if given is not None:
                values[name] = given
        max_tokens, max_tokens_field = self._max_tokens()
        values["max_tokens"] = default_max_tokens if max_tokens is None else max_tokens
        values["logprobs"] = logprobs
        values["stop"] = self.stop
        values["stop_token_ids"] = self.stop_token_ids or ()
        try:
            return SamplingParams(**values)
        except RequestError as exc:
            names = {"max_tokens": max_tokens_field, "logprobs": logprobs_field}
            raise _renamed(exc, names) from None

    def _max_tokens(self) -> tuple[int | None, str]:
        """Return the limit and the name under which the request gave it."""
        old, new = self.max_tokens, self.max_completion_tokens
        if old is not None and new is not None and old != new:
            raise HttpError(
                400,
                f"max_tokens ({old}) and max_completion_tokens ({new}) differ; give one of them",
                code="invalid_value",
                param="max_completion_tokens",
            )
        return (old, "max_tokens") if new is None else (new, "max_completion_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedRequest:
    """One HTTP request: what it asks of the engine, and how its answer is written."""

    body: GenerationFields
    envelope: Envelope
    adapter_name: str | None  # None = the base model
    prompts: Sequence[Prompt]
    sampling: SamplingParams
    echoes: Sequence[str] = ()  # by prompt, written before its texts; empty = not asked for


def _renamed(exc: RequestError, names: Mapping[str, str]) -> RequestError:
    """Return ``exc`` about the field as the request spelt it."""
    name = names.get(exc.param or "")
    if name is None or name == exc.param:
        return exc
    return RequestError(str(exc).replace(str(exc.param), name, 1), param=name)

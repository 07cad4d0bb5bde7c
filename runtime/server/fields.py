"""Fields that completions and chat completions share, and the checks of their shapes."""

from typing import Annotated

from pydantic import BeforeValidator

from .body import RequestModel, kind_of, show
from .errors import HttpError


def _check_stop(value: object) -> object:
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise HttpError(
            400,
            f"stop is {show(value)} ({kind_of(value)}), must be a string or a list of strings",
            code="invalid_type",
            param="stop",
        )
    for index, item in enumerate(value):
        if not isinstance(item, str):
            raise HttpError(
                400,
                f"stop[{index}] is {show(item)} ({kind_of(item)}), must be a string",
                code="invalid_type",
                param=f"stop[{index}]",
            )
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

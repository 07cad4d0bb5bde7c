"""The body of ``POST /v1/completions``."""

from typing import Any

from .body import kind_of, show
from .errors import HttpError
from .fields import GenerationFields

Prompt = str | list[int]


class CompletionRequest(GenerationFields):
    """One or several prompts, as text or as token ids."""

    prompt: Any
    logprobs: int | None = None
    echo: bool | None = None

    def prompts(self) -> list[Prompt]:
        """Return the prompts one by one. Raises ``HttpError`` for any other shape."""
        value = self.prompt
        if isinstance(value, str):
            return [_checked(value, "prompt")]
        if not isinstance(value, list):
            raise _wrong("prompt", value, "a string, a list of strings or token ids")
        if not value:
            raise HttpError(400, "prompt is empty", code="empty_prompt", param="prompt")
        if isinstance(value[0], (str, list)):
            return [_checked(item, f"prompt[{i}]", like=value[0]) for i, item in enumerate(value)]
        return [_checked(value, "prompt")]


def _checked(value: object, path: str, *, like: object = None) -> Prompt:
    """Return ``value`` if it is text or token ids, and of the kind of ``like`` if given."""
    if like is not None and type(value) is not type(like):
        wanted = "a string" if isinstance(like, str) else "a list of token ids"
        raise _wrong(path, value, f"{wanted} like the prompts before it")
    if not value:
        raise HttpError(400, f"{path} is empty", code="empty_prompt", param=path)
    if isinstance(value, str):
        return value
    assert isinstance(value, list)
    for index, item in enumerate(value):
        if type(item) is not int:
            raise _wrong(f"{path}[{index}]", item, "a token id (an integer)")
    token_ids: list[int] = value
    return token_ids


def _wrong(path: str, value: object, wanted: str) -> HttpError:
    return HttpError(
        400,
        f"{path} is {show(value)} ({kind_of(value)}), must be {wanted}",
        code="invalid_type",
        param=path,
    )

"""What the routes share whose bodies are translated to that of a chat."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from ..errors import RequestError
from .json_values import wrong_type


@contextmanager
def names_of_fields(names: Mapping[str, str]) -> Iterator[None]:
    """In errors, replace names of a chat's fields by ``names``, those of the translated body."""
    try:
        yield
    except RequestError as error:
        if error.param is not None:
            param, text = _name_of(error.param, names), str(error)
            if error.param.startswith("messages["):  # the body has no item of this number
                text = f"{param}, as a chat: {text}"
            elif text.startswith(error.param):
                text = param + text.removeprefix(error.param)
            error.param, error.args = param, (text, *error.args[1:])
        raise


def _name_of(param: str, names: Mapping[str, str]) -> str:
    if param.startswith("messages"):
        return names.get("messages", "messages")
    if param.startswith("tools["):
        return param.replace("].function", "]", 1)
    for name, here in names.items():
        if param == name or param.startswith((f"{name}.", f"{name}[")):
            return here + param.removeprefix(name)
    return param


def string_of(value: object, path: str) -> str:
    """Return a text. Raises ``HttpError`` for another value, with its ``path``."""
    if not isinstance(value, str):
        raise wrong_type(path, value, "a string")
    return value

"""What ``/v1/responses`` and ``/v1/messages`` share: their bodies become that of a chat."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar, TypeVar

from ..errors import RequestError
from .body import RequestModel, read_model
from .chat import ChatEndpoint, ChatRequest
from .endpoint import OpenRecord
from .generation_request import ParsedRequest
from .json_values import wrong_type
from .open_requests import GatewayRequest
from .sse import ResponseWriter

_Asked = TypeVar("_Asked", bound=RequestModel)


class TranslatedEndpoint(ChatEndpoint):
    """Answers as a chat; errors name the fields of the body that the client sent."""

    field_names: ClassVar[Mapping[str, str]]  # see ``names_of_fields``

    async def _as_chat(
        self,
        translate: Callable[[_Asked], dict[str, Any]],
        asked: _Asked,
        record: OpenRecord,
        *,
        is_large: bool,
    ) -> ParsedRequest:
        with names_of_fields(self.field_names):
            chat = read_model(ChatRequest, translate(asked))
            return await self._parsed(chat, record.request_id, is_large=is_large)

    async def _answer(
        self,
        request: ParsedRequest,
        writer: ResponseWriter,
        origin: GatewayRequest | None,
        record: OpenRecord,
    ) -> None:
        with names_of_fields(self.field_names):
            await super()._answer(request, writer, origin, record)


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

"""How many tokens texts have, where no answer says so: engines are asked about a few of them."""

from collections import Counter
from contextlib import suppress
from typing import Any

import aiohttp
import msgspec

from ...server.errors import HttpError
from ...tasks import TaskSet, cancel_all
from ..http.calls import call
from .bodies import TokenRatio
from .links import EngineLink

_PATH = "/tokenize"
_TIMEOUT_S = 5.0
_FIRST = 4  # of each name and kind, then one in so many:
_ONE_IN = 256
_MAX_TEXT_BYTES = 1 << 16


class _TokenizeBody(msgspec.Struct, omit_defaults=True):
    model: str | None = None
    prompt: Any = msgspec.UNSET  # JSON
    messages: Any = msgspec.UNSET  # JSON


class _Count(msgspec.Struct):
    """Of an answer what is wanted: engines of other kinds have other fields beside it."""

    count: int


class TokenSamples:
    """What streams do not say: their usage is not asked for, and must not be in the stream then."""

    def __init__(self, session: aiohttp.ClientSession, ratio: TokenRatio) -> None:
        self._session = session
        self._ratio = ratio
        self._num_seen: Counter[tuple[str | None, bool]] = Counter()
        self._tasks = TaskSet()

    def record(self, link: EngineLink, text: bytes, name: str | None, *, is_chat: bool) -> None:
        """An engine has answered a request with this text; ``name``: the adapter that it has."""
        number = self._num_seen[name, is_chat] = self._num_seen[name, is_chat] + 1
        is_one_text = is_chat or text.startswith(b'"')
        if not is_one_text or len(text) > _MAX_TEXT_BYTES:
            return
        if number <= _FIRST or number % _ONE_IN == 0:
            self._tasks.begin(self._ask(link, text, name, is_chat=is_chat))

    async def close(self) -> None:
        """Ask nothing more."""
        await cancel_all(*self._tasks)

    async def _ask(self, link: EngineLink, text: bytes, name: str | None, *, is_chat: bool) -> None:
        field = "messages" if is_chat else "prompt"
        served = None if name is None else link.served.get(name)
        model = name if served is None else served.model or name
        body = _TokenizeBody(model=model, **{field: msgspec.Raw(text)})
        with suppress(HttpError):  # it is only about being more exact
            tokens = await call(
                self._session, link.card.url + _PATH, body, _Count, timeout_s=_TIMEOUT_S
            )
            self._ratio.observe(text, tokens.count, name, is_chat=is_chat)

"""Measures tokens per text where answers have no usage: engines tokenize a few texts."""

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
_FIRST = 4  # texts of each adapter and kind; then one in _ONE_IN
_ONE_IN = 256
_MAX_TEXT_BYTES = 1 << 16


class _TokenizeBody(msgspec.Struct, omit_defaults=True):
    model: str | None = None
    prompt: Any = msgspec.UNSET  # JSON
    messages: Any = msgspec.UNSET  # JSON


class _Count(msgspec.Struct):
    """The field of the answer that is used; the others depend on the engine type."""

    count: int


class TokenSamples:
    """Token counts of streams without usage, which clients must request."""

    def __init__(self, session: aiohttp.ClientSession, ratio: TokenRatio) -> None:
        self._session = session
        self._ratio = ratio
        self._num_seen: Counter[tuple[str | None, bool]] = Counter()
        self._tasks = TaskSet()

    def record(self, link: EngineLink, text: bytes, name: str | None, *, is_chat: bool) -> None:
        """Record an answered request with this text; ``name``: its adapter."""
        number = self._num_seen[name, is_chat] = self._num_seen[name, is_chat] + 1
        is_one_text = is_chat or text.startswith(b'"')
        if not is_one_text or len(text) > _MAX_TEXT_BYTES:
            return
        if number <= _FIRST or number % _ONE_IN == 0:
            self._tasks.begin(self._ask(link, text, name, is_chat=is_chat))

    async def close(self) -> None:
        """Cancel all running calls."""
        await cancel_all(*self._tasks)

    async def _ask(self, link: EngineLink, text: bytes, name: str | None, *, is_chat: bool) -> None:
        field = "messages" if is_chat else "prompt"
        served = None if name is None else link.served.get(name)
        model = name if served is None else served.model or name
        body = _TokenizeBody(model=model, **{field: msgspec.Raw(text)})
        with suppress(HttpError):  # samples only improve estimates
            tokens = await call(self._session, link.card.url + _PATH, body, _Count, timeout_s=_TIMEOUT_S)
            self._ratio.observe(text, tokens.count, name, is_chat=is_chat)

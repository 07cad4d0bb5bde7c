"""Calls between processes of a cluster: a struct out, a struct back, within a deadline."""

import asyncio
from typing import TypeVar

import aiohttp
import msgspec

from ...server.errors import ErrorBody, HttpError
from ..wire import decode

CONNECT_TIMEOUT_S = 2.0
_MAX_CHARS_SHOWN = 200

_T = TypeVar("_T")


class UnreachableError(HttpError):
    """Another process of the cluster is absent or silent, or its answer is invalid.

    Clients get a 503: a retry may succeed. A refusal by another process is an ``HttpError`` with
    that process's status, code and message.
    """

    def __init__(self, message: str) -> None:
        super().__init__(503, message, code="unreachable")


def make_session(key: str) -> aiohttp.ClientSession:
    """Return a session that sends the cluster's key; the caller closes it."""
    return aiohttp.ClientSession(
        headers={"Authorization": f"Bearer {key}"},
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
    )


async def call(
    session: aiohttp.ClientSession, url: str, body: msgspec.Struct | None, kind: type[_T], *, timeout_s: float
) -> _T:
    """POST ``body``, or GET without one, and return the answer, which is JSON of ``kind``.

    Raises:
        UnreachableError: There is no answer within ``timeout_s``, or it is not of ``kind``.
        HttpError: The other side refused.
    """
    status, answer = await fetch(session, url, body, timeout_s=timeout_s)
    if status >= 400:
        raise refusal_of(url, status, answer)
    try:
        return decode(answer, kind)
    except msgspec.DecodeError as error:
        raise UnreachableError(f"invalid answer from {url}: {error}") from None


async def fetch(
    session: aiohttp.ClientSession, url: str, body: msgspec.Struct | None, *, timeout_s: float
) -> tuple[int, bytes]:
    """POST ``body``, or GET without one; return status and body of any answer.

    Raises ``UnreachableError`` if there is none within ``timeout_s``.
    """
    method, data = ("GET", None) if body is None else ("POST", msgspec.json.encode(body))
    headers = {} if data is None else {"Content-Type": "application/json"}
    try:
        async with (
            asyncio.timeout(timeout_s),
            session.request(method, url, data=data, headers=headers) as response,
        ):
            return response.status, await response.read()
    except TimeoutError:
        raise UnreachableError(f"{url} did not answer within {timeout_s:g} s") from None
    except (aiohttp.ClientError, OSError, ValueError) as error:
        raise UnreachableError(f"{url} cannot be reached: {one_line(error)}") from None


def refusal_of(url: str, status: int, answer: bytes) -> HttpError:
    """Return the error in another process's answer."""
    try:
        error = decode(answer, ErrorBody).error
    except msgspec.DecodeError:
        return UnreachableError(f"{url} answers {status}, without an error of corun")
    return HttpError(status, error.message, code=error.code, param=error.param)


def one_line(error: Exception) -> str:
    """Return the text of an error, or its name without one."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text[:_MAX_CHARS_SHOWN]

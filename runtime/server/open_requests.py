"""The requests that are being answered: ids, numbers from gateways, and reasons to end one early.

``x-request-id`` has the id that a client or the server gave.

A gateway numbers the requests that it sends to an engine, in a header. It adds a request to the
engine's load itself until a state of the engine includes that number. The ledger says which numbers
that are, so that each request is counted once. It is bounded: the oldest requests, and those of the
gateway that was silent the longest, count as included.
"""

import asyncio
import re
import uuid
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from starlette.types import Receive

from ..engine_state import GATEWAY_HEADER, Accepted
from .errors import ClientGoneError, InvalidValueError

HEADER = b"x-request-id"
# A client's id must be safe in headers, logs and JSON.
_GIVEN = re.compile(rb"[\x21-\x7e]{1,128}")

_MAX_GATEWAYS = 64
_WINDOW = 1024  # newest requests of a gateway that are tracked one by one
_NUMBER_HEADER = GATEWAY_HEADER.encode()
_NUMBER = re.compile(rb"([A-Za-z0-9._-]{1,64}):([1-9][0-9]{0,14})")


def new_id() -> str:
    """Return a new id."""
    return uuid.uuid4().hex


def given_id(scope: Mapping[str, Any]) -> str | None:
    """Return the client's id, if it sent a valid one."""
    for name, value in scope["headers"]:
        if name == HEADER and _GIVEN.fullmatch(value):
            return str(value.decode())
    return None


def answer_id(prefix: str, given: str | None) -> str:
    """Return the id of an answer. It is unique, even if the client repeats its own."""
    return f"{prefix}-{new_id()}" if given is None else f"{prefix}-{given}-{new_id()[:8]}"


class OpenRequest:
    """One request that is being answered, by the task that made this object.

    It ends early because its client leaves, because the engine dies or because the server stops.
    In each case its task is cancelled with a cause; closing its generators aborts it in the engine.
    """

    def __init__(self, task: "asyncio.Task[object]") -> None:
        self.cause: Exception | None = None
        self._task = task

    def end(self, cause: Exception) -> None:
        """Cancel the request; the first cause counts."""
        if self.cause is None:
            self.cause = cause
            self._task.cancel()


class OpenRequests:
    """All requests that are being answered."""

    def __init__(self) -> None:
        self._requests: set[OpenRequest] = set()

    def __len__(self) -> int:
        return len(self._requests)

    @contextmanager
    def track(self) -> Iterator[OpenRequest]:
        """Count the current task as open; raise the cause if ``end`` cancels it."""
        task = asyncio.current_task()
        assert task is not None
        request = OpenRequest(task)
        self._requests.add(request)
        try:
            yield request
        except asyncio.CancelledError:
            if request.cause is None:
                raise
            task.uncancel()
            raise request.cause from None
        finally:
            self._requests.discard(request)

    def end_all(self, cause: Exception) -> None:
        for request in tuple(self._requests):
            request.end(cause)

    async def wait_none(self, timeout_s: float, *, poll_interval_s: float = 0.02) -> bool:
        """Return True once no request is open, or False after ``timeout_s``."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout_s
        while self._requests:
            if loop.time() >= deadline_s:
                return False
            await asyncio.sleep(poll_interval_s)
        return True


@contextmanager
def ended_by_disconnect(receive: Receive, request: OpenRequest) -> Iterator[None]:
    """End ``request`` when its client closes the connection. The body must have been read."""
    watcher = asyncio.ensure_future(_wait_disconnect(receive, request))
    try:
        yield
    finally:
        watcher.cancel()


async def _wait_disconnect(receive: Receive, request: OpenRequest) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    request.end(ClientGoneError())


class GatewayRequest:
    """One numbered request. A state includes it once it includes all its engine requests."""

    __slots__ = ("_ledger", "_unsent", "gateway", "number")

    def __init__(self, ledger: "GatewayLedger", gateway: str, number: int) -> None:
        self._ledger = ledger
        self._unsent: set[str] = set()  # ids of prompts not yet sent to the engine
        self.gateway = gateway
        self.number = number

    def expects(self, prompt_ids: Iterable[str]) -> None:
        """These prompts will be sent."""
        self._unsent.update(prompt_ids)
        self._ledger.expect(self, self._unsent)

    def sent(self, prompt_id: str) -> bool:
        """Record that a prompt was sent; return whether it was the last one."""
        self._unsent.discard(prompt_id)
        return not self._unsent

    def ended(self) -> None:
        """Record that it was answered, with success or not: nothing computes for it any more."""
        self._ledger.remove(self._unsent)
        self._ledger.accept(self)


class _Numbers:
    """The numbers of one gateway."""

    def __init__(self) -> None:
        self.last = 0
        self.missing: set[int] = set()

    def add(self, number: int) -> bool:
        """Add a number; return whether it is new."""
        if number <= self.last:
            is_new = number in self.missing
            self.missing.discard(number)
            return is_new
        self.missing.update(range(max(self.last + 1, number - _WINDOW), number))
        self.missing = {one for one in self.missing if one >= number - _WINDOW}
        self.last = number
        return True


class GatewayLedger:
    """All gateways that send requests here."""

    def __init__(self) -> None:
        self.num_changes = 0
        self._numbers: dict[str, _Numbers] = {}  # the latest active gateway last
        self._expected: dict[str, GatewayRequest] = {}  # by prompts that will be sent
        # In the order of sending: the number of engine requests that the state must include.
        self._unknown: deque[tuple[int, GatewayRequest]] = deque()

    def open(self, headers: Iterable[tuple[bytes, bytes]]) -> GatewayRequest | None:
        """Return a request of a gateway; None = not from a gateway.

        Raises ``HttpError`` for a malformed header.
        """
        for name, value in headers:
            if name == _NUMBER_HEADER:
                found = _NUMBER.fullmatch(value)
                if found is None:
                    raise InvalidValueError(
                        f"{GATEWAY_HEADER} must be ID:N, N counted from 1, ID up to 64 of A-Z a-z 0-9 . _ -",
                        param=GATEWAY_HEADER,
                    )
                return GatewayRequest(self, found[1].decode(), int(found[2]))
        return None

    def expect(self, request: GatewayRequest, prompt_ids: Iterable[str]) -> None:
        """Prompts with these ids will be sent for ``request``."""
        self._expected.update(dict.fromkeys(prompt_ids, request))

    def remove(self, prompt_ids: Iterable[str]) -> None:
        """Prompts with these ids will not be sent."""
        for prompt_id in prompt_ids:
            self._expected.pop(prompt_id, None)

    def sent(self, prompt_id: str, num_requests: int) -> None:
        """Record that a prompt, of a gateway or not, was sent to the engine.

        The state includes it once the engine has received ``num_requests`` requests.
        """
        request = self._expected.pop(prompt_id, None)
        if request is not None and request.sent(prompt_id):
            self._unknown.append((num_requests, request))

    def accept(self, request: GatewayRequest) -> None:
        """Mark a request as included in the state, or as ended."""
        numbers = self._numbers.pop(request.gateway, None) or _Numbers()
        self._numbers[request.gateway] = numbers
        self.num_changes += numbers.add(request.number)
        if len(self._numbers) > _MAX_GATEWAYS:
            del self._numbers[next(iter(self._numbers))]

    def accept_known(self, num_requests: int) -> dict[str, Accepted]:
        """Return what a state includes once the engine has received ``num_requests`` requests."""
        while self._unknown and self._unknown[0][0] <= num_requests:
            self.accept(self._unknown.popleft()[1])
        return {
            gateway: Accepted(last=numbers.last, missing=tuple(sorted(numbers.missing)))
            for gateway, numbers in self._numbers.items()
        }

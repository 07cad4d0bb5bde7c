"""Tracks which requests of gateways the engine's state includes, so that each is counted once.

A gateway numbers the requests that it sends to an engine, in a header. It adds a request to the
engine's load itself until a state of the engine includes that number. The ledger is bounded: the
oldest requests, and those of the gateway that was silent the longest, count as included.
"""

import re
from collections import deque
from collections.abc import Iterable

from ..engine_state import GATEWAY_HEADER, Accepted
from .errors import HttpError

_MAX_GATEWAYS = 64
_WINDOW = 1024  # newest requests of a gateway that are tracked one by one
_HEADER = GATEWAY_HEADER.encode()
_FORM = re.compile(rb"([A-Za-z0-9._-]{1,64}):([1-9][0-9]{0,14})")


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
            if name == _HEADER:
                found = _FORM.fullmatch(value)
                if found is None:
                    raise HttpError(
                        400,
                        f"{GATEWAY_HEADER} must be ID:N, N counted from 1, ID up to 64 of A-Z a-z 0-9 . _ -",
                        code="invalid_value",
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

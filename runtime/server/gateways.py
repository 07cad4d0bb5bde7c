"""Which requests of gateways the engine's state has in it, so that none is counted twice or never.

A gateway numbers the requests that it sends to an engine and says so in a header. Until the state
that it hears has a request in it, it adds that one itself. Bounded: what is the longest ago, or of
the gateway that has been silent the longest, is taken to be in it.
"""

import re
from collections import deque
from collections.abc import Iterable

from ..engine_state import GATEWAY_HEADER, Accepted
from .errors import HttpError

_MAX_GATEWAYS = 64
_WINDOW = 1024  # requests of a gateway before its newest of which each is known
_HEADER = GATEWAY_HEADER.encode()
_FORM = re.compile(rb"([A-Za-z0-9._-]{1,64}):([1-9][0-9]{0,14})")


class GatewayRequest:
    """One numbered request: it is in the state when that knows all its engine requests."""

    __slots__ = ("_ledger", "_unsent", "gateway", "number")

    def __init__(self, ledger: "GatewayLedger", gateway: str, number: int) -> None:
        self._ledger = ledger
        self._unsent: set[str] = set()  # ids of prompts that the engine has not been sent yet
        self.gateway = gateway
        self.number = number

    def expects(self, prompt_ids: Iterable[str]) -> None:
        """These prompts will be sent."""
        self._unsent.update(prompt_ids)
        self._ledger.expect(self, self._unsent)

    def sent(self, prompt_id: str) -> bool:
        """One of its prompts has been sent; return whether that was the last one."""
        self._unsent.discard(prompt_id)
        return not self._unsent

    def ended(self) -> None:
        """It has been answered, well or badly: nobody computes for it."""
        self._ledger.remove(self._unsent)
        self._ledger.accept(self)


class _Numbers:
    """Of one gateway."""

    def __init__(self) -> None:
        self.last = 0
        self.missing: set[int] = set()

    def add(self, number: int) -> bool:
        """Whether that is news."""
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
        self._numbers: dict[str, _Numbers] = {}  # the one that was heard of last is last
        self._expected: dict[str, GatewayRequest] = {}  # by prompts that will be sent
        # In the order of sending: how many engine requests the state must know.
        self._unknown: deque[tuple[int, GatewayRequest]] = deque()

    def open(self, headers: Iterable[tuple[bytes, bytes]]) -> GatewayRequest | None:
        """Return a request of a gateway; None = of somebody else.

        Raises ``HttpError`` for a header that is no number of any gateway.
        """
        for name, value in headers:
            if name == _HEADER:
                found = _FORM.fullmatch(value)
                if found is None:
                    raise HttpError(
                        400, f"{GATEWAY_HEADER} must be ID:N, N counted from 1 on, ID up to 64 of "
                        "A-Z a-z 0-9 . _ -", code="invalid_value", param=GATEWAY_HEADER,
                    )  # fmt: skip
                return GatewayRequest(self, found[1].decode(), int(found[2]))
        return None

    def expect(self, request: GatewayRequest, prompt_ids: Iterable[str]) -> None:
        """Prompts with these ids will be sent for ``request``."""
        self._expected.update(dict.fromkeys(prompt_ids, request))

    def remove(self, prompt_ids: Iterable[str]) -> None:
        """They will not."""
        for prompt_id in prompt_ids:
            self._expected.pop(prompt_id, None)

    def sent(self, prompt_id: str, num_requests: int) -> None:
        """A prompt, perhaps of a gateway, has been sent to the engine.

        The state has it once it knows so many engine requests.
        """
        request = self._expected.pop(prompt_id, None)
        if request is not None and request.sent(prompt_id):
            self._unknown.append((num_requests, request))

    def accept(self, request: GatewayRequest) -> None:
        """It is in the state, or is nowhere any more."""
        numbers = self._numbers.pop(request.gateway, None) or _Numbers()
        self._numbers[request.gateway] = numbers
        self.num_changes += numbers.add(request.number)
        if len(self._numbers) > _MAX_GATEWAYS:
            del self._numbers[next(iter(self._numbers))]

    def accept_known(self, num_requests: int) -> dict[str, Accepted]:
        """Return what a state has in it that knows so many engine requests."""
        while self._unknown and self._unknown[0][0] <= num_requests:
            self.accept(self._unknown.popleft()[1])
        return {
            gateway: Accepted(last=numbers.last, missing=tuple(sorted(numbers.missing)))
            for gateway, numbers in self._numbers.items()
        }

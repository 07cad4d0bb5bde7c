"""Connections that wait for their clients, of which each client address has a limited number.

Bookkeeping without I/O. An IPv6 address counts by its first 64 bits, as one client has all others.
"""

import ipaddress
from collections import defaultdict
from collections.abc import Hashable
from typing import Generic, TypeVar

_C = TypeVar("_C", bound=Hashable)


class IdleConnections(Generic[_C]):
    """The idle connections of one server, by client address, the longest idle one first."""

    def __init__(self, max_per_client: int) -> None:
        """``max_per_client``: 0 = no limit."""
        self._max_per_client = max_per_client
        self._of_client: defaultdict[str, dict[_C, None]] = defaultdict(dict)

    def add(self, connection: _C, client: str) -> _C | None:
        """Add a connection that becomes idle; return one that is too many for this client."""
        if not self._max_per_client:
            return None
        idle = self._of_client[client]
        idle[connection] = None
        if len(idle) <= self._max_per_client:
            return None
        longest_idle = next(iter(idle))
        del idle[longest_idle]
        return longest_idle

    def discard(self, connection: _C, client: str) -> None:
        """Remove a connection that is not idle any more, or never was."""
        idle = self._of_client.get(client)
        if idle is not None:
            idle.pop(connection, None)
            if not idle:
                del self._of_client[client]


def client_of(host: str) -> str:
    """Return the client that an address belongs to: an IPv4 address or an IPv6 network."""
    if ":" not in host:
        return host
    address = ipaddress.IPv6Address(host.partition("%")[0])
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.IPv6Network((address, 64), strict=False))

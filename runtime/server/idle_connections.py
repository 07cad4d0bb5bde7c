"""Connections that wait for their clients, of which each client address has a limited number.

Bookkeeping without I/O. IPv6 addresses with the same first 64 bits are one client, which usually
has all of them.
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
        self._crowded: set[str] = set()  # clients with too many

    def add(self, connection: _C, client: str) -> bool:
        """Add a connection that becomes idle; return whether its client has too many."""
        if not self._max_per_client:
            return False
        idle = self._of_client[client]
        idle[connection] = None
        if len(idle) <= self._max_per_client:
            return False
        self._crowded.add(client)
        return True

    def take_surplus(self, client: str | None = None) -> _C | None:
        """Remove and return the longest idle connection of a client, if that has too many.

        ``client``: None = any client that has too many.
        """
        if client is None:
            client = next(iter(self._crowded), "")
        if client not in self._crowded:
            return None
        longest_idle = next(iter(self._of_client[client]))
        self.discard(longest_idle, client)
        return longest_idle

    def discard(self, connection: _C, client: str) -> None:
        """Remove a connection if it is idle."""
        idle = self._of_client.get(client)
        if idle is not None:
            idle.pop(connection, None)
            if len(idle) <= self._max_per_client:
                self._crowded.discard(client)
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

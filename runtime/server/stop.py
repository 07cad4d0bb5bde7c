"""How a server is asked to end, and what its process then says of it."""

import asyncio

EXIT_OK = 0
EXIT_ENGINE_DEAD = 1


class StopSignals:
    """How often somebody asked the server to stop."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()

    def receive(self) -> None:
        """Take one request to stop: the second means at once."""
        if self.first.is_set():
            self.second.set()
        self.first.set()

"""Hands a request's outputs to a function, in the very turn of the event loop in which they arrive.

A task that waits for outputs is woken for each of them, which at hundreds of streams costs more
than the rest of a token's way. So the function is called at once, and the task sleeps until the
function has to wait, until the request has ended, or until something has gone wrong.
"""

from collections.abc import Awaitable, Callable

from .generation import Generation
from .outputs import RequestOutput
from .waker import Waker

# Takes an output at once; returns what must be awaited before it can take another, if anything.
# It is the same object every time, and changes with the next: what is kept of it must be copied.
Take = Callable[[RequestOutput], Awaitable[None] | None]


class Delivery:
    """One generation on its way to one ``take``. What comes while that waits is merged."""

    __slots__ = (
        "_failure",
        "_has_ended",
        "_is_behind",
        "_is_ready",
        "_output",
        "_rest",
        "_take",
        "_waker",
    )

    def __init__(self, take: Take) -> None:
        self._take = take
        self._waker = Waker()
        self._is_ready = True  # ``take`` may be called
        self._is_behind = False  # something came while it might not
        self._has_ended = False  # the last output has been taken
        self._output: RequestOutput | None = None  # one for all times
        self._rest: Awaitable[None] | None = None
        self._failure: Exception | None = None

    def notify(self, generation: Generation) -> None:
        """Hand over what is new, now or when ``take`` is ready again. Never raises."""
        if not self._is_ready:
            self._is_behind = True
        elif generation.error is None:
            self._give(generation)
        else:
            self._waker.set()

    async def run(self, generation: Generation) -> None:
        """Return when the last output of ``generation`` has been taken.

        Raises the generation's error, and what ``take`` raises.
        """
        while True:
            await self._waker
            if self._rest is not None:
                await self._rest
                self._rest = None
            error = self._failure or generation.error
            if error is not None:
                raise error
            if self._has_ended:
                return
            self._is_ready = True
            if self._is_behind:
                self._give(generation)

    def _give(self, generation: Generation) -> None:
        self._is_behind = False
        try:
            output = self._output
            if output is None:
                output = self._output = generation.output()
            else:
                generation.tell(output)
            self._rest = self._take(output)
            self._has_ended = output.finished
        except Exception as error:  # it is the task's, not the event loop's
            self._failure = error
        if self._rest is not None or self._failure is not None or self._has_ended:
            self._is_ready = False
            self._waker.set()

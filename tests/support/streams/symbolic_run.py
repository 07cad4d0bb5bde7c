"""Runs a program of the symbolic device in one order, which a test may draw."""

from collections.abc import Callable, Collection, Sequence

from support.streams.symbolic import Recording
from support.streams.symbolic_findings import ProtocolError
from support.streams.symbolic_judge import Runner, Trail, lines_of
from support.streams.symbolic_state import FoundError

Chooser = Callable[[Sequence[int]], int]
"""Returns one of the agents that can go on; the host, agent 0, is the last of them."""


def run(recording: Recording, chooser: Chooser) -> tuple[str, ...]:
    """Run in the order that ``chooser`` makes, and return it: a line per step.

    Raises ``ProtocolError``.
    """
    runner = Runner(recording)
    state = runner.start()
    trail: Trail = None
    try:
        while ready := runner.ready(state):
            agent = chooser(ready)
            assert agent in ready, "the chooser takes an agent that cannot go on"
            trail = runner.follow(trail, state, agent)
            runner.advance(state, agent)
    except FoundError as error:
        raise ProtocolError(error.finding, lines_of(trail)) from None
    return lines_of(trail)


class Priorities:
    """A chooser: the first agent of ``order`` that can go on.

    At the steps ``change_at`` that agent is first moved to the end.

    Few changes reach most mistakes ("A Randomized Scheduler with Probabilistic Guarantees of
    Finding Bugs", Burckhardt et al., 2010, section 3), enough changes every order. Agents that
    are not in ``order`` come last.
    """

    def __init__(self, order: Sequence[int], change_at: Collection[int] = ()) -> None:
        self._order = list(order)
        self._change_at = frozenset(change_at)
        self._num_steps = 0

    def __call__(self, ready: Sequence[int]) -> int:
        """The agent of ``ready`` that goes on."""
        self._order += [agent for agent in ready if agent not in self._order]
        chosen = min(ready, key=self._order.index)
        if self._num_steps in self._change_at:
            self._order.remove(chosen)
            self._order.append(chosen)
            chosen = min(ready, key=self._order.index)
        self._num_steps += 1
        return chosen


class Choices:
    """A chooser: ``numbers`` say which of those that can go on; at their end, the first does."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self._numbers = iter(numbers)

    def __call__(self, ready: Sequence[int]) -> int:
        """The agent of ``ready`` that goes on."""
        return ready[next(self._numbers, 0) % len(ready)]

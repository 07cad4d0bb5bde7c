"""Runs a small program of the symbolic device in every legal order."""

from collections.abc import Iterator
from dataclasses import dataclass

from support.streams.symbolic import Recording
from support.streams.symbolic_findings import ExplorationLimitError, Finding, ProtocolError
from support.streams.symbolic_judge import Runner, Trail, lines_of
from support.streams.symbolic_state import FoundError, State


@dataclass(frozen=True, slots=True)
class Exploration:
    """What all orders of a program come to.

    ``errors`` has one of each kind of finding, in a shortest order that leads to that kind.

    ``num_orders`` counts orders that differ in more than steps that do not affect each other.
    """

    num_states: int
    num_orders: int
    errors: tuple[ProtocolError, ...]

    @property
    def kinds(self) -> set[type[Finding]]:
        """The kinds of what was found."""
        return {type(error.finding) for error in self.errors}

    def check(self) -> None:
        """Raise the first ``ProtocolError``, if there is one."""
        for error in self.errors:
            raise error


@dataclass(slots=True)
class _Node:
    state: State
    trail: Trail
    num_orders: int


def explore(recording: Recording, *, max_states: int = 200_000, is_reduced: bool = True) -> Exploration:
    """Run in every legal order. An order ends at its first finding, others go on.

    States that different orders lead to are visited once. ``is_reduced`` leaves out orders that
    differ from another one only in steps that do not affect each other (``symbolic_reduction``).
    Raises ``ExplorationLimitError`` beyond ``max_states``.
    """
    runner = Runner(recording)
    errors: dict[type[Finding], ProtocolError] = {}
    try:
        start = runner.start()
    except ProtocolError as error:
        return Exploration(0, 0, (error,))
    level = {start.key(): _Node(start, None, 1)}
    num_states = num_orders = 0
    while level:
        num_states += len(level)
        if num_states > max_states:
            raise ExplorationLimitError(f"the program has more than {max_states} states")
        following: dict[tuple[object, ...], _Node] = {}
        for node in level.values():
            for found in _expand(runner, node, following, is_reduced=is_reduced):
                errors.setdefault(type(found.finding), found)
            num_orders += node.num_orders  # of those that ended here
        level = following
    return Exploration(num_states, num_orders, tuple(errors.values()))


def _expand(
    runner: Runner, node: _Node, following: dict[tuple[object, ...], _Node], *, is_reduced: bool
) -> Iterator[ProtocolError]:
    """Add the states one step after ``node``, and leave in it the orders that end there."""
    ready = runner.ready(node.state, is_reduced=is_reduced)
    num_orders = node.num_orders
    if ready:
        node.num_orders = 0
    for agent in ready:
        state = node.state.copy()
        trail = runner.follow(node.trail, state, agent)
        try:
            runner.advance(state, agent)
        except FoundError as error:
            yield ProtocolError(error.finding, lines_of(trail))
        except ProtocolError as error:
            yield error
        else:
            known = following.setdefault(state.key(), _Node(state, trail, 0))
            known.num_orders += num_orders
            continue
        node.num_orders += num_orders

"""Finds steps that need not be tried in every order, as they do not affect other agents.

The idea is a persistent set of one step ("Partial-Order Methods for the Verification of
Concurrent Systems", Godefroid, 1996, chapter 4): if a step that can be taken now commutes with
everything that other agents may do before it, and they cannot disable it, then any order is
equivalent to one in which it comes now. Here these are

- the host's enqueuing, which only lets a stream do more;
- signals, waits, records: words have one writer and only go forward, events are recorded once, so
  a wait that can pass stays so; and the host's synchronizing;
- accesses to buffers that no other agent writes, or, if this one writes them, none touches.

All but the first change the answers to questions, so with a question ahead they count.
"""

from support.streams.symbolic_program import (
    HOST,
    AskDone,
    Begin,
    Buffer,
    End,
    Issue,
    Join,
    Program,
    Record,
    ReleaseWaits,
    Signal,
    Wait,
    WaitEvent,
)
from support.streams.symbolic_state import State


class Reduction:
    """Of one program."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._private_accesses = _private_accesses(program)
        questions = [
            index
            for index, step in enumerate(program.agents[HOST].steps)
            if isinstance(step, AskDone | ReleaseWaits)
        ]
        self._last_question = max(questions, default=-1)

    def reduce(self, state: State, ready: list[int]) -> list[int]:
        """One of ``ready`` with a step that need not be tried later, or else all of them."""
        has_questions = state.positions[HOST] <= self._last_question or bool(state.signalled)
        for agent in ready:
            step = state.next_step(self._program, agent)
            if isinstance(step, Issue):
                return [agent]
            if has_questions:
                continue
            if isinstance(step, Signal | Wait | Record | WaitEvent | Join):
                return [agent]
            if isinstance(step, Begin | End) and step.access.index in self._private_accesses:
                return [agent]
        return ready


def _private_accesses(program: Program) -> frozenset[int]:
    users: dict[str, set[int]] = {}
    writers: dict[str, set[int]] = {}
    for index, agent in enumerate(program.agents):
        for step in agent.steps:
            if isinstance(step, Begin):
                for buffer in step.access.writes:
                    writers.setdefault(buffer.name, set()).add(index)
                for buffer in (*step.access.reads, *step.access.writes):
                    users.setdefault(buffer.name, set()).add(index)

    def is_private(buffer: Buffer) -> bool:
        if buffer.lease is not None:
            return False
        return len(users[buffer.name]) == 1 or not writers.get(buffer.name)

    return frozenset(
        access.index
        for access in program.accesses
        if all(is_private(buffer) for buffer in (*access.reads, *access.writes))
    )

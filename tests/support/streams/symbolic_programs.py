"""Orders and small programs for the symbolic device, drawn by hypothesis, and a second opinion.

``is_ordered`` decides from the graph of what comes before what whether a program without slots is
right. It runs nothing, so it shares no code with the runs that it is compared with.
"""

from collections.abc import Iterator

import hypothesis.strategies as st
from corun.gpu.device.base import Event
from support.streams.symbolic import SymbolicDevice
from support.streams.symbolic_program import (
    HOST,
    Access,
    Begin,
    Buffer,
    End,
    Issue,
    Join,
    Program,
    Record,
    Signal,
    Wait,
    WaitEvent,
)
from support.streams.symbolic_run import Choices, Chooser, Priorities

_BUFFERS = [Buffer("a"), Buffer("b")]
_Place = tuple[int, int]  # agent and step


def choosers(*, num_agents: int, num_steps: int) -> st.SearchStrategy[Chooser]:
    """Orders: few changes between agents, or any choice at each of the first steps."""
    priorities = st.builds(
        Priorities,
        st.permutations([*range(1, num_agents), HOST]),
        st.sets(st.integers(0, num_steps), max_size=6),
    )
    return priorities | st.builds(Choices, st.lists(st.integers(0, num_agents - 1), max_size=60))


def small_programs() -> st.SearchStrategy[list[tuple[str, int, int]]]:
    """Calls for ``write_down``: what is done, and two numbers that say with what."""
    verbs = ["launch", "launch", "record", "wait event", "signal", "wait", "work", "work wait"]
    call = st.tuples(st.sampled_from([*verbs, "join"]), st.integers(0, 3), st.integers(0, 3))
    return st.lists(call, min_size=3, max_size=9)


def write_down(device: SymbolicDevice, calls: list[tuple[str, int, int]]) -> None:
    """Two streams and a worker that touch two buffers, in an order made by events and two words.

    Nothing that a device refuses, and no word with two writers; but it may hang or be wrong.
    """
    streams = [device.stream("first"), device.stream("second")]
    worker = device.process("worker")
    start, to_worker, to_stream = (device.word(name) for name in ("start", "to worker", "back"))
    device.host.compute(writes=_BUFFERS)
    device.host.signal(start, 1)
    worker.wait(start, 1)
    recorded: list[Event] = []
    num_signals, num_works = 0, 0
    for verb, which, how in calls:
        stream, buffer = streams[which % 2], _BUFFERS[which // 2 % 2]
        reads, writes = ([], [buffer]) if how % 2 else ([buffer], [])
        if verb == "launch":
            device.launch(stream, _nothing, reads=reads, writes=writes)
        elif verb == "record":
            recorded.append(device.event())
            device.record(stream, recorded[-1])
        elif verb == "wait event" and recorded:
            device.wait_event(stream, recorded[how % len(recorded)])
        elif verb == "signal":
            num_signals += 1
            device.signal(streams[0], to_worker, num_signals)
        elif verb == "wait":
            device.wait(streams[0], to_stream, _reachable(how, num_works))
        elif verb == "work":
            num_works += 1
            worker.compute(reads=reads, writes=writes)
            worker.signal(to_stream, num_works)
        elif verb == "work wait":
            worker.wait(to_worker, _reachable(how, num_signals))
        elif verb == "join":
            device.synchronize(stream, timeout_s=1)
            device.host.compute(reads=reads, writes=writes)


def _reachable(how: int, num_signals: int) -> int:
    """A value that was signalled so far, or sometimes the next one, so that some programs hang."""
    return num_signals + 1 if how == 3 else num_signals - how


def _nothing() -> None:
    pass


def is_ordered(program: Program) -> bool:
    """Whether every wait is released, and every two accesses in conflict are in one order.

    For programs without slots and questions.
    """
    before = _before(program)
    if before is None:
        return False
    accesses = [
        ((agent, index), step.access)
        for agent, queue in enumerate(program.agents)
        for index, step in enumerate(queue.steps)
        if isinstance(step, Begin)
    ]
    ends = {
        step.access.index: (agent, index)
        for agent, queue in enumerate(program.agents)
        for index, step in enumerate(queue.steps)
        if isinstance(step, End)
    }
    return all(
        ends[one.index] in before[other_begin] or ends[other.index] in before[one_begin]
        for one_begin, one in accesses
        for other_begin, other in accesses
        if one_begin[0] != other_begin[0] and _is_conflict(one, other)
    )


def _is_conflict(one: Access, other: Access) -> bool:
    return bool(set(one.writes) & {*other.reads, *other.writes} or set(other.writes) & set(one.reads))


def _before(program: Program) -> dict[_Place, set[_Place]] | None:
    """All steps that come before each step in every order; None if some step never comes."""
    causes: dict[_Place, list[_Place | None]] = {
        (agent, index): [(agent, index - 1)] if index else []
        for agent, queue in enumerate(program.agents)
        for index, _ in enumerate(queue.steps)
    }
    for place, cause in _causes(program):
        causes[place].append(cause)
    before: dict[_Place, set[_Place]] = {}
    while len(before) < len(causes):
        known = [
            place
            for place, earlier in causes.items()
            if place not in before and all(cause in before for cause in earlier)
        ]
        if not known:
            return None
        for place in known:
            earlier = [cause for cause in causes[place] if cause is not None]
            before[place] = set(earlier).union(*(before[cause] for cause in earlier))
    return before


def _causes(program: Program) -> Iterator[tuple[_Place, _Place | None]]:
    """A step and one that it needs, which is None where it needs what never comes."""
    for agent, queue in enumerate(program.agents):
        for index, step in enumerate(queue.steps):
            match step:
                case Issue(stream, num_steps):
                    yield (stream, num_steps - 1), (agent, index)
                    if isinstance(program.agents[stream].steps[num_steps - 1], End):
                        yield (stream, num_steps - 2), (agent, index)
                case Wait(word, value) if value > program.initial_words[word]:
                    yield (agent, index), _find_signal(program, word, value)
                case WaitEvent(event):
                    yield (agent, index), _find_record(program, event)
                case Join(targets):
                    for stream, num_steps in targets:
                        if num_steps:
                            yield (agent, index), (stream, num_steps - 1)


def _find_signal(program: Program, word: str, value: int) -> _Place | None:
    for agent, queue in enumerate(program.agents):
        for index, step in enumerate(queue.steps):
            if isinstance(step, Signal) and step.word == word and step.value >= value:
                return agent, index
    return None


def _find_record(program: Program, event: Event) -> _Place | None:
    for agent, queue in enumerate(program.agents):
        if Record(event) in queue.steps:
            return agent, queue.steps.index(Record(event))
    return None

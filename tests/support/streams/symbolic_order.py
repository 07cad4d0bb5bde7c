"""Decides from what comes before what whether programs of the symbolic device are right.

A word has one writer and only goes forward, an event is recorded once, and a queue is taken in its
order. So what a step waits for comes before it in every legal order, and nothing else does: vector
clocks of one run say it for all of them. A program is right if none of these is found, for all
answers that the device may give to the questions of its host.

========================= ==========================================================================
``UNORDERED``             two agents touch a buffer in either order or at a time, one of them writing
``UNWRITTEN``             no write comes before a read
``USE_AFTER_HAND_ON``     an operation may touch a slot that its owner does not have
``SLOT_IN_USE``           a slot may be taken before its last owner has given it back
``HANG``                  agents wait, and nothing releases them
``HANG_IN_ONE_QUEUE``     the same, on a device that runs all streams in the order of issue
``TWO_WRITERS``           two agents signal one word
``SIGNAL_BACKWARDS``      a word is signalled with a value below the one before
``WORD_BETWEEN_STREAMS``  a stream waits for another by a word instead of an event
``MISSING_RELEASE``       leases or events are still held when the device is closed
========================= ==========================================================================
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from itertools import combinations

from corun.gpu.device.base import DeviceError, Event
from corun.shm.words import has_reached
from support.streams.symbolic import Recording
from support.streams.symbolic_program import (
    HOST,
    Access,
    Agent,
    AskDone,
    Begin,
    Buffer,
    End,
    GiveBack,
    Issue,
    Join,
    Program,
    Record,
    Signal,
    Step,
    Take,
    Wait,
    WaitEvent,
)

_MAX_QUESTIONS = 64

_Clock = tuple[int, ...]  # by agent: how many of its steps come before a step, which counts itself
_Place = tuple[int, int]  # agent and step


class Kind(Enum):
    """What can be wrong with a program."""

    UNORDERED = auto()
    UNWRITTEN = auto()
    USE_AFTER_HAND_ON = auto()
    SLOT_IN_USE = auto()
    HANG = auto()
    HANG_IN_ONE_QUEUE = auto()
    TWO_WRITERS = auto()
    SIGNAL_BACKWARDS = auto()
    WORD_BETWEEN_STREAMS = auto()
    MISSING_RELEASE = auto()


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that must not be, and where."""

    kind: Kind
    what: str

    def __str__(self) -> str:
        return f"{self.kind.name}: {self.what}"


class ProtocolError(Exception):
    """A program is wrong; the message has all findings."""


class QuestionLimitError(Exception):
    """The host asks more questions than the limit."""


def check(recording: Recording) -> None:
    """Raise ``ProtocolError`` if a program of ``recording`` is wrong."""
    if found := findings(recording):
        raise ProtocolError("\n".join(map(str, found)))


def kinds(recording: Recording) -> set[Kind]:
    """The kinds of what is wrong with programs of ``recording``."""
    return {finding.kind for finding in findings(recording)}


def findings(recording: Recording) -> tuple[Finding, ...]:
    """All that is wrong with the programs of ``recording``, one for each series of answers.

    Raises ``QuestionLimitError``, and ``DeviceError`` if the host does not repeat its calls.
    """
    found: dict[Finding, None] = {}
    pending: list[tuple[int, ...]] = [()]
    while pending:
        answers = pending.pop()
        if len(answers) > _MAX_QUESTIONS:
            raise QuestionLimitError(f"the host asks more than {_MAX_QUESTIONS} questions")
        program = recording.program(answers)
        if answers:
            _check_repeated(recording.program(answers[:-1]), program)
        order = Order(program, answers)
        wrong = dict.fromkeys(_judge(program, answers, order))
        found |= wrong
        if program.is_open and not wrong:
            pending += [(*answers, answer) for answer in order.possible_answers()]
    return tuple(found)


def _check_repeated(before: Program, program: Program) -> None:
    for old, new in zip(before.agents, program.agents, strict=False):
        if new.steps[: len(old.steps)] != old.steps:
            raise DeviceError(f"{old.name} does something else when it is run again")


class Order:
    """What comes before what in a program, given the answers to its host's questions."""

    def __init__(self, program: Program, answers: Sequence[int] = ()) -> None:
        self._program = program
        self._answers = answers
        self._num_asked = 0
        self._clocks: list[list[_Clock]] = [[] for _ in program.agents]  # of steps that are taken
        self._issued: list[list[_Clock]] = [[] for _ in program.agents]  # by step of a stream
        self._signals: dict[str, list[tuple[int, _Clock]]] = defaultdict(list)
        self._records: dict[Event, _Clock] = {}
        while any([self._advance(agent) for agent in range(len(program.agents))]):
            pass

    def is_before(self, one: _Place, other: _Place) -> bool:
        """Whether the step ``one`` comes before ``other`` in every order; both are taken."""
        return self._clocks[other[0]][other[1]][one[0]] > one[1]

    def waiting(self) -> list[str]:
        """The agents that cannot take their next step, and these steps."""
        return [
            f"{agent.name} {agent.steps[len(clocks)]}"
            for agent, clocks, issued in zip(self._program.agents, self._clocks, self._issued, strict=True)
            if len(clocks) < (len(issued) if agent.is_stream else len(agent.steps))
        ]

    def is_taken(self, place: _Place) -> bool:
        """Whether the step is taken in the end; those that wait for ever are not."""
        return len(self._clocks[place[0]]) > place[1]

    def possible_answers(self) -> tuple[int, ...]:
        """Of the question that ends the program."""
        question = self._program.agents[HOST].steps[-1]
        assert isinstance(question, AskDone)
        recorded = self._records.get(question.event)
        if recorded is None:
            return (0,)
        is_recorded = all(one <= other for one, other in zip(recorded, self._clocks[HOST][-1], strict=True))
        return (1,) if is_recorded else (0, 1)

    def _advance(self, agent: int) -> bool:
        """Let ``agent`` take steps until it waits; whether it took any."""
        steps, clocks = self._program.agents[agent].steps, self._clocks[agent]
        num_before = len(clocks)
        while len(clocks) < len(steps):
            step = steps[len(clocks)]
            causes = self._causes(agent, step)
            if causes is None:
                break
            own = [len(clocks) + 1 if other == agent else 0 for other in range(len(self._clocks))]
            clocks.append(tuple(map(max, zip(own, *causes, *clocks[-1:], strict=True))))
            self._take(step, clocks[-1])
        return len(clocks) > num_before

    def _causes(self, agent: int, step: Step) -> list[_Clock] | None:
        """Of steps that other agents take before; None if they have not taken them."""
        causes: list[_Clock | None] = []
        if self._program.agents[agent].is_stream:
            causes += self._issued[agent][len(self._clocks[agent]) :][:1] or [None]
        match step:
            case Wait(word, value) if not has_reached(self._program.initial_words[word], value):
                reached = (clock for signalled, clock in self._signals[word] if has_reached(signalled, value))
                causes.append(next(reached, None))
            case WaitEvent(event):
                causes.append(self._records.get(event))
            case AskDone(event) if any(self._answers[self._num_asked : self._num_asked + 1]):
                causes.append(self._records.get(event))
            case Join(targets):
                for other, count in targets:
                    if count:
                        causes += self._clocks[other][count - 1 :][:1] or [None]
        known = [cause for cause in causes if cause is not None]
        return known if len(known) == len(causes) else None

    def _take(self, step: Step, clock: _Clock) -> None:
        match step:
            case Issue(stream, num_steps):
                issued = self._issued[stream]
                issued += [clock] * (num_steps - len(issued))
            case Signal(word, value):
                self._signals[word].append((value, clock))
            case Record(event):
                self._records[event] = clock
            case AskDone():
                self._num_asked += 1


def _judge(program: Program, answers: Sequence[int], order: Order) -> Iterator[Finding]:
    """What is wrong with a program, or with its steps up to the question that ends it."""
    yield from _word_findings(program)
    if program.is_closed and program.held:
        yield Finding(Kind.MISSING_RELEASE, f"still held at the end: {', '.join(program.held)}")
    waiting = order.waiting()
    if program.is_open:  # what streams and processes wait for may come later
        waiting = [] if order.is_taken((HOST, len(program.agents[HOST].steps) - 1)) else waiting
    if waiting:
        yield Finding(Kind.HANG, f"nothing releases: {'; '.join(waiting)}")
    elif not program.is_open and (waiting := Order(_in_one_queue(program), answers).waiting()):
        yield Finding(Kind.HANG_IN_ONE_QUEUE, f"nothing releases: {'; '.join(waiting)}")
    uses: dict[str, list[_Use]] = defaultdict(list)
    for use in _uses(program):
        if order.is_taken(use.end):
            uses[use.buffer.name].append(use)
    leases = _Leases(program, order)
    for of_name in uses.values():
        yield from _conflicts(order, of_name)
        for use in of_name:
            yield from leases.judge(use)
    yield from leases.overlaps()


def _word_findings(program: Program) -> Iterator[Finding]:
    """What is wrong with words in every order."""
    writers: dict[str, list[Agent]] = defaultdict(list)
    for agent in program.agents:
        values = dict(program.initial_words)
        for step in agent.steps:
            if not isinstance(step, Signal):
                continue
            if agent not in writers[step.word]:
                writers[step.word].append(agent)
            if not has_reached(step.value, values[step.word]):
                yield Finding(Kind.SIGNAL_BACKWARDS, f"{agent.name} {step} after {values[step.word]}")
            values[step.word] = step.value
    for word, agents in writers.items():
        if len(agents) > 1:
            names = ", ".join(agent.name for agent in agents)
            yield Finding(Kind.TWO_WRITERS, f"{word} has several writers: {names}")
        for waiter in program.agents:
            is_pair = waiter.is_stream and agents[0].is_stream and waiter is not agents[0]
            if is_pair and any(isinstance(step, Wait) and step.word == word for step in waiter.steps):
                text = f"{waiter.name} waits for {agents[0].name} by {word}: take an event"
                yield Finding(Kind.WORD_BETWEEN_STREAMS, text)


@dataclass(frozen=True, slots=True)
class _Use:
    """``access`` reads or writes ``buffer`` from ``begin`` to ``end``."""

    access: Access
    buffer: Buffer
    begin: _Place
    end: _Place
    is_write: bool


def _uses(program: Program) -> Iterator[_Use]:
    for number, agent in enumerate(program.agents):
        ends = {step.access: index for index, step in enumerate(agent.steps) if isinstance(step, End)}
        for index, step in enumerate(agent.steps):
            if isinstance(step, Begin):
                begin, end = (number, index), (number, ends[step.access])
                for is_write, buffers in enumerate((step.access.reads, step.access.writes)):
                    for buffer in buffers:
                        yield _Use(step.access, buffer, begin, end, bool(is_write))


def _conflicts(order: Order, uses: Sequence[_Use]) -> Iterator[Finding]:
    """Of uses of one name. What a launch enqueues on its own stream runs in its place."""
    for one, other in combinations(uses, 2):
        if one.begin[0] == other.begin[0] or one.buffer != other.buffer:
            continue
        is_conflict = one.is_write or other.is_write
        if is_conflict and not (
            order.is_before(one.end, other.begin) or order.is_before(other.end, one.begin)
        ):
            text = f"{one.access} and {other.access} are at {one.buffer} in either order"
            yield Finding(Kind.UNORDERED, text)
    for read in uses:
        is_written = any(
            write.is_write and write.buffer == read.buffer and order.is_before(write.end, read.begin)
            for write in uses
        )
        if not read.is_write and not is_written:
            yield Finding(Kind.UNWRITTEN, f"{read.access}: nothing has written {read.buffer}")


class _Leases:
    """Where slots are taken and given back, by their handles."""

    def __init__(self, program: Program, order: Order) -> None:
        self._order = order
        self._taken: dict[Buffer, _Place] = {}
        self._given: dict[Buffer, _Place] = {}
        for number, agent in enumerate(program.agents):
            for index, step in enumerate(agent.steps):
                if isinstance(step, Take | GiveBack) and order.is_taken((number, index)):
                    places = self._taken if isinstance(step, Take) else self._given
                    places[Buffer(step.name, step.lease)] = (number, index)

    def judge(self, use: _Use) -> Iterator[Finding]:
        """Whether the slot is its handle's all the time."""
        if use.buffer.lease is None:
            return
        is_late = not self._is_before(use.end, self._given.get(use.buffer))
        if (
            is_late
            or use.buffer not in self._taken
            or not self._is_before(self._taken[use.buffer], use.begin)
        ):
            text = f"{use.access}: {use.buffer} may be another owner's"
            yield Finding(Kind.USE_AFTER_HAND_ON, text)

    def overlaps(self) -> Iterator[Finding]:
        """Owners that may have a slot at the same time as the one before."""
        for slot, taken in self._taken.items():
            assert slot.lease is not None
            before = Buffer(slot.name, slot.lease - 1)
            is_early = slot.lease > 1 and not (
                before in self._given and self._is_before(self._given[before], taken)
            )
            if is_early or not self._is_before(taken, self._given.get(slot)):
                yield Finding(Kind.SLOT_IN_USE, f"{slot} may be taken or given back by another owner")

    def _is_before(self, one: _Place, other: _Place | None) -> bool:
        """Also if the other step is not taken."""
        return other is None or self._order.is_before(one, other)


def _in_one_queue(program: Program) -> Program:
    """The same program on a device that runs the streams' steps one by one, in order of issue.

    It may: an order that words make is unknown to it, and streams share hardware queues.
    """
    queue = len(program.agents)
    merged: list[Step] = []
    places: dict[_Place, int] = {}  # stream and step, to the step in the one queue
    issued: dict[int, int] = defaultdict(int)
    host: list[Step] = []
    for step in program.agents[HOST].steps:
        if isinstance(step, Issue):
            for index in range(issued[step.agent], step.num_steps):
                places[step.agent, index] = len(merged)
                merged.append(program.agents[step.agent].steps[index])
            issued[step.agent] = step.num_steps
            host.append(Issue(queue, len(merged)))
        elif isinstance(step, Join):
            ends = [places[agent, count - 1] + 1 for agent, count in step.targets if count]
            host.append(Join(((queue, max(ends, default=0)),)))
        else:
            host.append(step)
    others = [Agent(agent.name, () if agent.is_stream else agent.steps) for agent in program.agents[1:]]
    agents = (Agent("host", tuple(host)), *others, Agent("the one queue", tuple(merged), is_stream=True))
    return Program(agents, program.initial_words)

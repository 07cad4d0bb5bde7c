"""A moment in a run of a program: the position of every agent, the contents of buffers and words.

``State.advance`` takes one step and raises for faults that do not depend on the rest of the
program. The caller checks from the returned views whether a read sees the right write.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from corun.gpu.device.base import Event
from corun.shm.words import has_reached
from support.streams.symbolic_findings import Finding, Overlap, ReadOfVoid, SlotInUse, UseAfterHandOn
from support.streams.symbolic_program import (
    HOST,
    Access,
    AskDone,
    Begin,
    Buffer,
    End,
    GiveBack,
    Issue,
    Join,
    Program,
    Record,
    ReleaseWaits,
    Signal,
    Step,
    Take,
    Wait,
    WaitEvent,
)


class FoundError(Exception):
    """A step must not be taken as things are."""

    def __init__(self, finding: Finding) -> None:
        self.finding = finding


@dataclass(frozen=True, slots=True)
class View:
    """The state of a buffer at the begin of ``access``: the index of its last write, or None.

    ``is_read``: it reads it, else it is about to overwrite it. ``is_void``: it works on contents
    without meaning, so which ones these are does not matter.
    """

    access: Access
    buffer: str
    writer: int | None
    is_read: bool
    is_void: bool


@dataclass(slots=True)
class State:
    """Of one program, or of one that begins like it. ``positions`` and ``issued`` are by agent."""

    positions: list[int]
    issued: list[int]
    words: dict[str, int]
    contents: dict[str, int] = field(default_factory=dict)  # index of the access that wrote it
    owners: dict[str, int] = field(default_factory=dict)  # leases
    active: dict[int, tuple[int, Access]] = field(default_factory=dict)  # agent, by access
    answers: tuple[int, ...] = ()
    # After waits were released: what their writers really signalled, and what rests on it.
    signalled: dict[str, int] = field(default_factory=dict)
    void_agents: frozenset[int] = frozenset()
    void_words: frozenset[str] = frozenset()
    void_events: frozenset[Event] = frozenset()
    void_buffers: frozenset[str] = frozenset()

    @classmethod
    def start(cls, program: Program) -> "State":
        """No agent has taken a step."""
        num_agents = len(program.agents)
        return cls([0] * num_agents, [0] * num_agents, dict(program.initial_words))

    def copy(self) -> "State":
        """A state that goes its own way."""
        return State(
            self.positions.copy(),
            self.issued.copy(),
            self.words.copy(),
            self.contents.copy(),
            self.owners.copy(),
            self.active.copy(),
            self.answers,
            self.signalled.copy(),
            self.void_agents,
            self.void_words,
            self.void_events,
            self.void_buffers,
        )

    def key(self) -> tuple[object, ...]:
        """States with equal keys have the same future. What is left out follows from the rest."""
        return (
            tuple(self.positions),
            self.answers,
            frozenset(self.contents.items()),
            frozenset(self.owners.items()),
            frozenset(self.words.items()),
            frozenset(self.signalled.items()),
            self.void_agents,
            self.void_words,
            self.void_events,
            self.void_buffers,
        )

    def extend(self, program: Program) -> None:
        """Go on in a program that begins like the one so far."""
        num_new = len(program.agents) - len(self.positions)
        self.positions += [0] * num_new
        self.issued += [0] * num_new
        for word, value in program.initial_words.items():
            self.words.setdefault(word, value)

    def next_step(self, program: Program, agent: int) -> Step | None:
        """The step that ``agent`` takes next; None at its end."""
        steps = program.agents[agent].steps
        position = self.positions[agent]
        return steps[position] if position < len(steps) else None

    def can_advance(self, program: Program, agent: int) -> bool:
        """Whether ``agent`` has a next step and can take it now."""
        step = self.next_step(program, agent)
        if step is None:
            return False
        if program.agents[agent].is_stream and self.positions[agent] >= self.issued[agent]:
            return False
        match step:
            case Wait(word, value):
                return has_reached(self.words[word], value)
            case WaitEvent(event):
                return self.is_recorded(program, event)
            case Join(targets):
                return all(self.positions[other] >= count for other, count in targets)
        return True

    def is_recorded(self, program: Program, event: Event) -> bool:
        """Whether the record of ``event`` is done."""
        agent, index = program.records[event]
        return self.positions[agent] > index

    def answer(self, program: Program, question: AskDone | ReleaseWaits) -> int:
        """What the host learns if it asks now."""
        if isinstance(question, AskDone):
            return int(self.is_recorded(program, question.event))
        return len(self._outstanding(program))

    def advance(self, program: Program, agent: int) -> list[View]:
        """Let ``agent`` take its next step, which ``can_advance`` allows.

        Raises ``FoundError``.
        """
        step = self.next_step(program, agent)
        views: list[View] = []
        match step:
            case Begin(access):
                views = list(self._begin(agent, access))
            case End(access):
                self._end(agent, access)
            case Issue(stream, num_steps):
                self.issued[stream] = num_steps
            case Take(name, lease):
                self._take(program, agent, name, lease)
            case GiveBack(name, lease):
                self._give_back(program, agent, name, lease)
            case ReleaseWaits():
                self._release_waits(program)
            case _:
                self._synchronize(program, agent, step)
        self.positions[agent] += 1
        return views

    def _begin(self, agent: int, access: Access) -> Iterator[View]:
        self.active[access.index] = (agent, access)
        is_void = agent in self.void_agents
        reads = {buffer.name for buffer in access.reads}
        for buffer in (*access.reads, *access.writes):
            self._check_lease(access, buffer)
        for name in sorted(reads):
            self._check_overlap(agent, access, name, is_write=False)
            if name in self.void_buffers and not is_void:
                raise FoundError(ReadOfVoid(access, name))
            yield View(access, name, self.contents.get(name), is_read=True, is_void=is_void)
        for name in sorted({buffer.name for buffer in access.writes}):
            self._check_overlap(agent, access, name, is_write=True)
            is_either_void = is_void or name in self.void_buffers
            yield View(access, name, self.contents.get(name), is_read=False, is_void=is_either_void)

    def _check_lease(self, access: Access, buffer: Buffer) -> None:
        owner = self.owners.get(buffer.name)
        if buffer.lease != owner:
            raise FoundError(UseAfterHandOn(access, buffer.name, buffer.lease, owner))

    def _check_overlap(self, agent: int, access: Access, name: str, *, is_write: bool) -> None:
        for other_agent, other in self.active.values():
            # What a launch enqueues on its own stream runs in its place.
            if other_agent == agent:
                continue
            touched = (*other.reads, *other.writes) if is_write else other.writes
            if any(buffer.name == name for buffer in touched):
                raise FoundError(Overlap(access, other, name))

    def _end(self, agent: int, access: Access) -> None:
        del self.active[access.index]
        names = frozenset(buffer.name for buffer in access.writes)
        for name in names:
            self.contents[name] = access.index
        is_void = agent in self.void_agents
        self.void_buffers = self.void_buffers | names if is_void else self.void_buffers - names

    def _check_nobody_uses(self, name: str, owner: int | None) -> None:
        for _, access in self.active.values():
            for buffer in (*access.reads, *access.writes):
                if buffer.name == name:
                    raise FoundError(UseAfterHandOn(access, name, buffer.lease, owner))

    def _take(self, program: Program, agent: int, name: str, lease: int) -> None:
        if name in self.owners:
            raise FoundError(SlotInUse(program.agents[agent].name, name, lease, self.owners[name]))
        self.owners[name] = lease
        self.contents.pop(name, None)
        self.void_buffers -= {name}

    def _give_back(self, program: Program, agent: int, name: str, lease: int) -> None:
        if self.owners.get(name) != lease:
            raise FoundError(SlotInUse(program.agents[agent].name, name, lease, self.owners.get(name)))
        self._check_nobody_uses(name, None)
        del self.owners[name]

    def _synchronize(self, program: Program, agent: int, step: Step | None) -> None:
        is_void = agent in self.void_agents
        match step:
            case Signal(word, value):
                self._signal(word, value, is_void=is_void)
            case Record(event) if is_void:
                self.void_events |= {event}
            case Wait(word, value) if agent != HOST:
                if self._is_void_wait(word, value):
                    self.void_agents |= {agent}
                elif not program.agents[agent].is_stream:
                    # A process starts on another job; a stream is void until the host knows.
                    self.void_agents -= {agent}
            case WaitEvent(event) if event in self.void_events:
                self.void_agents |= {agent}
            case Join(targets):
                # The host knows now what was released, and makes a new start.
                self.void_agents -= {other for other, _ in targets}

    def _signal(self, word: str, value: int, *, is_void: bool) -> None:
        self.void_words = self.void_words | {word} if is_void else self.void_words - {word}
        if word in self.signalled:
            self.signalled[word] = value
        if not has_reached(self.words[word], value):
            self.words[word] = value

    def _is_void_wait(self, word: str, value: int) -> bool:
        return word in self.void_words or not has_reached(self.signalled.get(word, value), value)

    def _outstanding(self, program: Program) -> dict[str, int]:
        furthest: dict[str, int] = {}
        for agent, (position, issued) in enumerate(zip(self.positions, self.issued, strict=True)):
            for step in program.agents[agent].steps[position:issued]:
                if isinstance(step, Wait) and not has_reached(self.words[step.word], step.value):
                    value = furthest.setdefault(step.word, step.value)
                    if has_reached(step.value, value):
                        furthest[step.word] = step.value
        return furthest

    def _release_waits(self, program: Program) -> None:
        for word, value in self._outstanding(program).items():
            self.signalled.setdefault(word, self.words[word])
            self.words[word] = value

"""Takes the steps of a program in any order and judges them by the reference order.

The reference is the order in which every agent goes as far as it can before the host goes on. A
program is right if in every other order each operation sees and replaces what it does there, and
nothing of what ``symbolic_findings`` names happens.
"""

from collections.abc import Iterator

from corun.gpu.device.base import DeviceError
from support.streams.symbolic import Recording
from support.streams.symbolic_checks import in_one_queue, static_findings
from support.streams.symbolic_findings import (
    ExplorationLimitError,
    Finding,
    Hang,
    HangInOneQueue,
    OverwriteBeforeRead,
    ProtocolError,
    ReadBeforeWrite,
    WriteOutOfOrder,
)
from support.streams.symbolic_program import (
    HOST,
    Access,
    AskDone,
    Begin,
    End,
    Issue,
    Program,
    ReleaseWaits,
    Step,
)
from support.streams.symbolic_reduction import Reduction
from support.streams.symbolic_state import FoundError, State, View

_MAX_QUESTIONS = 64

Trail = tuple["Trail", str, Step] | None
"""How a state was reached: the steps before the last one, its agent's name, and itself."""


def lines_of(trail: Trail) -> tuple[str, ...]:
    """A line per step, the first one first; an access that nothing interrupts is one line.

    The host's enqueuing is left out: it is before what it enqueues.
    """
    lines: list[str] = []
    end: Step | None = None
    while trail is not None:
        trail, agent, step = trail
        if isinstance(step, Begin) and isinstance(end, End) and step.access == end.access:
            lines[-1] = f"{agent} does {step.access.what}"
        elif not isinstance(step, Issue):
            lines.append(f"{agent} {step}")
        if not isinstance(step, Issue):
            end = step
    return tuple(reversed(lines))


class Reference:
    """A program, and what its accesses see and replace in the reference order.

    Raises ``ProtocolError`` for what is wrong in every order.
    """

    def __init__(self, program: Program) -> None:
        for finding in static_findings(program):
            raise ProtocolError(finding)
        self.program = program
        self.accesses = program.accesses
        self.reduction = Reduction(program)
        # What an access reads (True) or replaces (False) in a buffer; void contents are left out.
        self.writers: dict[tuple[int, str, bool], int | None] = {}
        self.ranks: dict[tuple[str, int | None], int] = {}  # of the writes of a buffer, in order
        for view in _run_in_reference_order(program, Hang):
            if not view.is_void:
                self.writers[view.access.index, view.buffer, view.is_read] = view.writer
            if not view.is_read:
                self.ranks[view.buffer, view.access.index] = len(self.ranks)
        for _ in _run_in_reference_order(in_one_queue(program), HangInOneQueue):
            pass

    def judge(self, view: View) -> Finding | None:
        """What is wrong with what an access sees or replaces."""
        key = (view.access.index, view.buffer, view.is_read)
        if view.is_void or key not in self.writers:
            return None
        expected, seen = self.writers[key], view.writer
        if expected == seen:
            return None
        expected_access, seen_access = self._access(expected), self._access(seen)
        if not view.is_read:
            return WriteOutOfOrder(view.access, view.buffer, expected_access, seen_access)
        assert expected_access is not None, "the reference order reads what nothing wrote"
        if seen_access is None or self.ranks[view.buffer, seen] < self.ranks[view.buffer, expected]:
            return ReadBeforeWrite(view.access, view.buffer, expected_access)
        return OverwriteBeforeRead(view.access, view.buffer, expected_access, seen_access)

    def _access(self, index: int | None) -> Access | None:
        return None if index is None else self.accesses[index]


def _ready(program: Program, state: State) -> list[int]:
    agents = [*range(1, len(program.agents)), HOST]
    return [agent for agent in agents if state.can_advance(program, agent)]


def _is_asking(program: Program, state: State) -> bool:
    """Whether the host is at the question that its program ends with."""
    return program.is_open and state.positions[HOST] == len(program.agents[HOST].steps) - 1


def _hang(program: Program, state: State, kind: type[Hang]) -> Finding | None:
    """The agents that wait for ever, if none can continue."""
    waiting = []
    for index, agent in enumerate(program.agents):
        step = state.next_step(program, index)
        if step is not None and (not agent.is_stream or state.issued[index] > state.positions[index]):
            waiting.append((agent.name, str(step)))
    return kind(tuple(waiting)) if waiting else None


def _follow(trail: Trail, program: Program, state: State, agent: int) -> Trail:
    step = state.next_step(program, agent)
    assert step is not None
    return (trail, program.agents[agent].name, step)


def _run_in_reference_order(program: Program, hang: type[Hang]) -> Iterator[View]:
    state = State.start(program)
    trail: Trail = None
    while True:
        ready = _ready(program, state)
        if ready == [HOST] and _is_asking(program, state):
            return
        if not ready:
            finding = _hang(program, state, hang)
            if finding is not None:
                raise ProtocolError(finding, lines_of(trail))
            return
        trail = _follow(trail, program, state, ready[0])
        try:
            views = state.advance(program, ready[0])
        except FoundError as error:
            raise ProtocolError(error.finding, lines_of(trail)) from None
        for view in views:
            if view.is_read and view.writer is None and not view.is_void:
                finding = ReadBeforeWrite(view.access, view.buffer, None)
                raise ProtocolError(finding, lines_of(trail))
        yield from views


class Runner:
    """Takes steps of a recording's programs, and judges them."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._references: dict[tuple[int, ...], Reference] = {}

    def reference(self, answers: tuple[int, ...]) -> Reference:
        """Of the program given these answers. Raises ``ProtocolError``."""
        if len(answers) > _MAX_QUESTIONS:
            raise ExplorationLimitError(f"the host asks more than {_MAX_QUESTIONS} questions")
        if answers not in self._references:
            self._references[answers] = Reference(self._recording.program(answers))
        return self._references[answers]

    def start(self) -> State:
        """Before the first step. Raises ``ProtocolError``."""
        return State.start(self.reference(()).program)

    def ready(self, state: State, *, is_reduced: bool = False) -> list[int]:
        """The agents to choose from; empty at the end."""
        reference = self.reference(state.answers)
        ready = _ready(reference.program, state)
        if is_reduced:
            ready = reference.reduction.reduce(state, ready)
        # What nothing releases here, nothing releases in the reference order.
        assert ready or _hang(reference.program, state, Hang) is None, "a hang of this order only"
        return ready

    def follow(self, trail: Trail, state: State, agent: int) -> Trail:
        """The trail with the next step of ``agent``."""
        return _follow(trail, self.reference(state.answers).program, state, agent)

    def advance(self, state: State, agent: int) -> None:
        """Let ``agent`` take its step.

        Raises ``FoundError``, or ``ProtocolError`` for what is wrong in every order from here.
        """
        program = self.reference(state.answers).program
        step = state.next_step(program, agent)
        if isinstance(step, AskDone | ReleaseWaits):
            state.answers = (*state.answers, state.answer(program, step))
            program = self._continue(program, state)
        views = state.advance(program, agent)
        for view in views:
            finding = self.reference(state.answers).judge(view)
            if finding is not None:
                raise FoundError(finding)

    def _continue(self, before: Program, state: State) -> Program:
        program = self.reference(state.answers).program
        for old, new in zip(before.agents, program.agents, strict=False):
            if new.steps[: len(old.steps)] != old.steps:
                raise DeviceError(f"{old.name} does something else when it is run again")
        state.extend(program)
        return program

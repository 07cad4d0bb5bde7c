"""What can be wrong with a program of the symbolic device.

Finding
├── ReadBeforeWrite     a read does not see the write that it is meant for
├── OverwriteBeforeRead a read sees a later write than the one that it is meant for
├── WriteOutOfOrder     two writes come in either order
├── Overlap             two agents touch a buffer at a time, one of them writing
├── UseAfterHandOn      an operation touches a slot after its owner has lost it
├── SlotInUse           a slot is taken while it has an owner, or given back by another owner
├── ReadOfVoid          a read sees what was computed behind a wait that was released by force
├── Hang                agents wait, and nothing releases them
├── HangInOneQueue      the same, on a device that runs all streams in the order of issue
├── TwoWriters          two agents signal one word
├── SignalBackwards     a word is signalled with a value below the one before
├── WordBetweenStreams  a stream waits for another by a word instead of an event
└── MissingRelease      leases or events are still held when the device is closed
"""

from dataclasses import dataclass

from support.streams.symbolic_program import Access

_MAX_LINES = 40


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that must not be; ``str`` says what."""


@dataclass(frozen=True, slots=True)
class ReadBeforeWrite(Finding):
    """``access`` is meant to see what ``expected`` wrote and comes before it.

    ``expected`` is None where nothing has written the buffer since it was made or handed on.
    """

    access: Access
    buffer: str
    expected: Access | None

    def __str__(self) -> str:
        if self.expected is None:
            return f"{self.access}: nothing has written {self.buffer}"
        return f"{self.access}: reads {self.buffer} before {self.expected} has written it"


@dataclass(frozen=True, slots=True)
class OverwriteBeforeRead(Finding):
    """``access`` is meant to see what ``expected`` wrote, which ``seen`` has overwritten."""

    access: Access
    buffer: str
    expected: Access
    seen: Access

    def __str__(self) -> str:
        return (
            f"{self.buffer} is overwritten before it is read: {self.access} is meant to see "
            f"{self.expected} and sees {self.seen}"
        )


@dataclass(frozen=True, slots=True)
class WriteOutOfOrder(Finding):
    """``access`` is meant to replace what ``expected`` wrote, and replaces ``seen``.

    None stands for a buffer that nothing has written yet.
    """

    access: Access
    buffer: str
    expected: Access | None
    seen: Access | None

    def __str__(self) -> str:
        return (
            f"{self.buffer} is written out of order: {self.access} is meant to replace "
            f"{self.expected or 'nothing'} and replaces {self.seen or 'nothing'}"
        )


@dataclass(frozen=True, slots=True)
class Overlap(Finding):
    """``access`` begins while ``other`` is at the same buffer, and one of them writes."""

    access: Access
    other: Access
    buffer: str

    def __str__(self) -> str:
        return f"{self.access} overlaps {self.other} in {self.buffer}"


@dataclass(frozen=True, slots=True)
class UseAfterHandOn(Finding):
    """``access`` uses a handle of a slot that now belongs to ``owner``, or to none."""

    access: Access
    slot: str
    lease: int | None
    owner: int | None

    def __str__(self) -> str:
        owner = "nobody's" if self.owner is None else f"of lease {self.owner}"
        return f"{self.access}: uses {self.slot} by lease {self.lease}, but it is {owner}"


@dataclass(frozen=True, slots=True)
class SlotInUse(Finding):
    """``agent`` takes or gives back the slot by ``lease`` while it is ``owner``'s."""

    agent: str
    slot: str
    lease: int
    owner: int | None

    def __str__(self) -> str:
        return f"{self.agent} moves {self.slot} (lease {self.lease}) while lease {self.owner} has it"


@dataclass(frozen=True, slots=True)
class ReadOfVoid(Finding):
    """``access`` relies on contents that are void since waits were released."""

    access: Access
    buffer: str

    def __str__(self) -> str:
        return f"{self.access}: the contents of {self.buffer} are void"


@dataclass(frozen=True, slots=True)
class Hang(Finding):
    """No agent can continue. ``waiting``: pairs (agent, the step that it cannot take)."""

    waiting: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        return "nothing releases: " + "; ".join(f"{agent} {step}" for agent, step in self.waiting)


@dataclass(frozen=True, slots=True)
class HangInOneQueue(Hang):
    """No agent can continue if the device runs all streams in the order of issue.

    It may: an order that words make is unknown to it, and streams share hardware queues.
    """

    def __str__(self) -> str:
        return "with all streams in one queue, " + Hang.__str__(self)


@dataclass(frozen=True, slots=True)
class TwoWriters(Finding):
    """``agents`` all signal ``word``."""

    word: str
    agents: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.word} has several writers: {', '.join(self.agents)}"


@dataclass(frozen=True, slots=True)
class SignalBackwards(Finding):
    """``agent`` signals ``value`` after ``previous``."""

    agent: str
    word: str
    value: int
    previous: int

    def __str__(self) -> str:
        return f"{self.agent} signals {self.word} = {self.value} after {self.previous}"


@dataclass(frozen=True, slots=True)
class WordBetweenStreams(Finding):
    """The stream ``waiter`` waits for ``word``, which the stream ``writer`` signals."""

    word: str
    writer: str
    waiter: str

    def __str__(self) -> str:
        return f"{self.waiter} waits for {self.writer} by {self.word}: take an event"


@dataclass(frozen=True, slots=True)
class MissingRelease(Finding):
    """What is still held when the host closes the device."""

    held: tuple[str, ...]

    def __str__(self) -> str:
        return f"still held at the end: {', '.join(self.held)}"


class ProtocolError(Exception):
    """A program is wrong: ``finding`` says what, ``schedule`` shows an order that leads there.

    ``schedule`` has a line per step: the agent's name and what it does, the last one being where
    it shows. The message has the last of them.
    """

    def __init__(self, finding: Finding, schedule: tuple[str, ...] = ()) -> None:
        self.finding = finding
        self.schedule = schedule
        lines = [f"{type(finding).__name__}: {finding}"]
        num_left_out = max(len(schedule) - _MAX_LINES, 0)
        if num_left_out:
            lines.append(f"({num_left_out} steps)")
        super().__init__("\n  ".join([*lines, *schedule[num_left_out:]]))


class ExplorationLimitError(Exception):
    """A program has more states, or asks more questions, than the limit that was given."""

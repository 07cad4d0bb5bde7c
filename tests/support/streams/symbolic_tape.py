"""How the symbolic device writes a program down: one tape for all agents."""

from collections.abc import Sequence

from corun.gpu.device.base import DeviceError, Word
from corun.shm.words import wrap
from support.streams.symbolic_program import Access, Begin, Buffer, End, Signal, Step, Wait


class Tape:
    """What all agents have written down so far."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.is_stream: list[bool] = []
        self.steps: list[list[Step]] = []
        self.initial_words: dict[str, int] = {}
        self.num_accesses = 0

    def add_agent(self, name: str, *, is_stream: bool) -> int:
        """The index of a new agent. Raises ``DeviceError`` for a name that is taken."""
        if name in self.names:
            raise DeviceError(f"there is an agent {name!r} already")
        self.names.append(name)
        self.is_stream.append(is_stream)
        self.steps.append([])
        return len(self.names) - 1

    def add(self, agent: int, step: Step) -> None:
        """Let ``agent`` do ``step`` after what it did so far."""
        if isinstance(step, Signal | Wait):
            self.initial_words.setdefault(step.word, 0)
        self.steps[agent].append(step)

    def access(self, agent: int, verb: str, reads: Sequence[Buffer], writes: Sequence[Buffer]) -> Access:
        """The next access, for a begin and an end."""
        access = Access(self.num_accesses, self.names[agent], verb, tuple(reads), tuple(writes))
        self.num_accesses += 1
        return access


class Process:
    """Writes down what an agent beside the device does, one thing after the other.

    The host's own actions take place in order with its calls to the device. Another process
    acts from the start, delayed only by its waits. After a process's death, the code that acts for
    it is the same agent: it has reaped the process before.
    """

    def __init__(self, tape: Tape, agent: int) -> None:
        self._tape = tape
        self._agent = agent

    def compute(self, *, reads: Sequence[Buffer] = (), writes: Sequence[Buffer] = ()) -> None:
        access = self._tape.access(self._agent, "compute", reads, writes)
        self._tape.add(self._agent, Begin(access))
        self._tape.add(self._agent, End(access))

    def signal(self, word: Word, value: int) -> None:
        """Store ``value`` with release order."""
        self._tape.add(self._agent, Signal(word.name, wrap(value)))

    def wait(self, word: Word, value: int) -> None:
        """Go on once ``word`` has reached ``value``."""
        self._tape.add(self._agent, Wait(word.name, wrap(value)))

"""The recordings of the symbolic device: the steps of agents in their order, as plain data.

An *agent* acts independently: the host, a stream, another process. It has a queue of *steps* that
it takes one after the other; the order between agents is open. An operation that touches buffers is
two steps, its begin and its end, so that two can overlap and any can be delayed.
"""

from dataclasses import dataclass

from corun.gpu.device.base import Event

HOST = 0
"""Index of the host among the agents."""


@dataclass(frozen=True, slots=True)
class Buffer:
    """A name that stands for memory.

    ``lease`` is None for a buffer that has one owner for ever. Else the name is a slot that is
    lent to one owner after the other, and this is the handle of the owner of that number.
    """

    name: str
    lease: int | None = None

    def __str__(self) -> str:
        return self.name if self.lease is None else f"{self.name} (lease {self.lease})"


@dataclass(frozen=True, slots=True)
class Access:
    """An operation that touches buffers. ``index`` counts them over all agents, from 0."""

    index: int
    agent: str
    verb: str
    reads: tuple[Buffer, ...]
    writes: tuple[Buffer, ...]

    @property
    def what(self) -> str:
        """The operation, without its agent."""
        return f"{self.verb} #{self.index} ({_names(self.reads)} -> {_names(self.writes)})"

    def __str__(self) -> str:
        return f"{self.agent}'s {self.what}"


def _names(buffers: tuple[Buffer, ...]) -> str:
    return ", ".join(map(str, buffers)) or "nothing"


@dataclass(frozen=True, slots=True)
class Begin:
    """From here on ``access`` may read and write."""

    access: Access

    def __str__(self) -> str:
        return f"begins {self.access.what}"


@dataclass(frozen=True, slots=True)
class End:
    """From here on ``access`` touches nothing, and what it wrote is there."""

    access: Access

    def __str__(self) -> str:
        return f"ends {self.access.what}"


@dataclass(frozen=True, slots=True)
class Signal:
    """Stores ``value`` to the word ``word``."""

    word: str
    value: int

    def __str__(self) -> str:
        return f"signals {self.word} = {self.value}"


@dataclass(frozen=True, slots=True)
class Wait:
    """Goes on once the word ``word`` has reached ``value``, cyclically."""

    word: str
    value: int

    def __str__(self) -> str:
        return f"waits for {self.word} >= {self.value}"


@dataclass(frozen=True, slots=True)
class Record:
    """Records ``event``."""

    event: Event

    def __str__(self) -> str:
        return f"records event {self.event.index}.{self.event.generation}"


@dataclass(frozen=True, slots=True)
class WaitEvent:
    """Goes on once ``event`` is recorded."""

    event: Event

    def __str__(self) -> str:
        return f"waits for event {self.event.index}.{self.event.generation}"


@dataclass(frozen=True, slots=True)
class Take:
    """The slot ``name`` has the owner ``lease`` from here on, and undefined contents."""

    name: str
    lease: int

    def __str__(self) -> str:
        return f"takes {self.name} (lease {self.lease})"


@dataclass(frozen=True, slots=True)
class GiveBack:
    """The owner ``lease`` gives the slot ``name`` back: any owner may take it."""

    name: str
    lease: int

    def __str__(self) -> str:
        return f"gives back {self.name} (lease {self.lease})"


@dataclass(frozen=True, slots=True)
class Issue:
    """The host has enqueued the first ``num_steps`` steps of the stream ``agent``."""

    agent: int
    num_steps: int

    def __str__(self) -> str:
        return f"issues up to step {self.num_steps} of agent {self.agent}"


@dataclass(frozen=True, slots=True)
class Join:
    """The host goes on once each agent has taken so many steps: pairs (agent, number of steps)."""

    targets: tuple[tuple[int, int], ...]

    def __str__(self) -> str:
        return "synchronizes with agents " + ", ".join(str(agent) for agent, _ in self.targets)


@dataclass(frozen=True, slots=True)
class AskDone:
    """The host asks whether ``event`` is recorded by now: 0 or 1.

    The answer depends on the order, and the host's next steps depend on the answer.
    """

    event: Event

    def __str__(self) -> str:
        return f"asks for event {self.event.index}.{self.event.generation}"


Step = Begin | End | Signal | Wait | Record | WaitEvent | Take | GiveBack | Issue | Join | AskDone


@dataclass(frozen=True, slots=True)
class Agent:
    """Its steps in order. Those of a stream can only be taken after the host has issued them."""

    name: str
    steps: tuple[Step, ...]
    is_stream: bool = False


@dataclass(frozen=True, slots=True)
class Program:
    """What the host does, given the answers to its first questions.

    It ends at the first question beyond, if there is one: ``is_open``. Longer answers give a
    program that begins with the same steps.
    """

    agents: tuple[Agent, ...]
    initial_words: dict[str, int]
    is_open: bool = False
    is_closed: bool = False  # the host closed the device at the end
    held: tuple[str, ...] = ()  # leases and events that were not given back

    @property
    def accesses(self) -> list[Access]:
        """All of them, by index."""
        begins = [step for agent in self.agents for step in agent.steps if isinstance(step, Begin)]
        return sorted((step.access for step in begins), key=lambda access: access.index)

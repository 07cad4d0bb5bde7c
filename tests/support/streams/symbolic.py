"""The symbolic device: named buffers, no arithmetic; its calls write a program down.

``symbolic_order`` then finds what is wrong with it in any order that the interface allows. The
program also says what goes on beside the device: what the host does to memory and words
(``SymbolicDevice.host``), what other processes do (``SymbolicDevice.process``), and when slots go
from one owner to the next (``lease`` and ``give_back``).
"""

import contextlib
from collections.abc import Callable, Sequence

from corun.gpu.device.base import DeviceError, Event, Stream, UnrecordedEventError, Word
from corun.shm.words import wrap
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


class UnansweredError(BaseException):
    """The host asked more than there are answers to; ``Recording`` catches it.

    Not an ``Exception``, so that the code under test does not take it for an error of the device.
    """


class SymbolicDevice:
    """Writes calls down. Implements ``Device[Buffer]`` but for ``release_waits``, on one host thread.

    ``launch`` calls ``compute`` at once, as CUDA does; what it enqueues on its own stream takes
    place while the launch does. What it raises marks its stream, unless that is adopted, and the
    stream leaves out what every device does. ``synchronize`` has no time to run out of: where it
    would never end, there is a ``HANG``. ``is_done`` returns the next of ``answers``, of which
    ``symbolic_order`` tries all.
    """

    def __init__(self, answers: Sequence[int] = ()) -> None:
        self._tape = Tape()
        self.host = Process(self._tape, self._tape.add_agent("host", is_stream=False))
        self._streams: dict[int, int] = {}  # stream index to agent
        self._launching: int | None = None
        self._adopted: set[int] = set()  # agents, as those that follow
        self._failures: dict[int, str] = {}  # in order
        self.num_left_out = 0  # operations, since they were enqueued on streams that had failed
        self._has_operations = False
        self._is_closed = False
        self._generations: list[int] = []  # of each event, the current one
        self._free_events: list[int] = []
        self._held_events: dict[Event, bool] = {}  # whether it is recorded
        self._num_leases: dict[str, int] = {}
        self._held_leases: dict[str, Buffer] = {}
        self._answers = tuple(answers)
        self._num_asked = 0
        self._is_open = False

    # What goes on beside the device.

    def process(self, name: str) -> Process:
        """Another process, to write down what it does. Call it before the first question."""
        return Process(self._tape, self._tape.add_agent(name, is_stream=False))

    def word(self, name: str, *, initial: int = 0) -> Word:
        """A word that holds ``initial`` at first."""
        if name in self._tape.initial_words:
            raise DeviceError(f"there is a word {name!r} already")
        self._tape.initial_words[name] = wrap(initial)
        return Word(name)

    def lease(self, name: str, stream: Stream | None = None) -> Buffer:
        """Take the slot ``name`` for a new owner, now or when ``stream`` gets there.

        Its contents are undefined. Raises ``DeviceError`` if it is not given back.
        """
        self._check_open()
        if name in self._held_leases:
            raise DeviceError(f"{self._held_leases[name]} is not given back")
        lease = self._num_leases.get(name, 0) + 1
        self._num_leases[name] = lease
        self._add_anywhere(stream, Take(name, lease))
        self._held_leases[name] = Buffer(name, lease)
        return self._held_leases[name]

    def give_back(self, buffer: Buffer, stream: Stream | None = None) -> None:
        """Let others have the slot, now or when ``stream`` gets there.

        Raises ``DeviceError`` for a handle that is not the slot's current one.
        """
        self._check_open()
        if self._held_leases.get(buffer.name) != buffer:
            raise DeviceError(f"{buffer} is not held")
        assert buffer.lease is not None
        self._add_anywhere(stream, GiveBack(buffer.name, buffer.lease))
        del self._held_leases[buffer.name]

    def program(self) -> Program:
        """What was written down so far."""
        agents = tuple(
            Agent(name, tuple(steps), is_stream)
            for name, steps, is_stream in zip(
                self._tape.names, self._tape.steps, self._tape.is_stream, strict=True
            )
        )
        events = (f"event {event.index}.{event.generation}" for event in self._held_events)
        return Program(
            agents,
            dict(self._tape.initial_words),
            is_open=self._is_open,
            is_closed=self._is_closed,
            held=(*map(str, self._held_leases.values()), *events),
        )

    # The device interface.

    def stream(self, name: str, *, is_urgent: bool = False) -> Stream:
        """See ``Device.stream``; whether it is urgent makes no difference to what is legal."""
        self._check_open()
        if self._has_operations:
            raise DeviceError(f"stream {name!r} is made after the first operation")
        stream = Stream(len(self._streams), name)
        self._streams[stream.index] = self._tape.add_agent(name, is_stream=True)
        return stream

    def adopt(self, stream: Stream) -> None:
        """See ``TorchDevice.adopt``."""
        self._adopted.add(self._agent(stream))

    def event(self) -> Event:
        """See ``Device.event``."""
        self._check_open()
        if self._free_events:
            index = self._free_events.pop()
        else:
            index = len(self._generations)
            self._generations.append(0)
        self._generations[index] += 1
        event = Event(index, self._generations[index])
        self._held_events[event] = False
        return event

    def release_event(self, event: Event) -> None:
        """See ``Device.release_event``."""
        self._check_held(event)
        del self._held_events[event]
        self._free_events.append(event.index)

    def copy(self, stream: Stream, destination: Buffer, source: Buffer) -> None:
        """See ``Device.copy``."""
        agent = self._agent(stream)
        if self._leaves_out(agent):
            return
        access = self._tape.access(agent, "copy", [source], [destination])
        self._enqueue(agent, Begin(access), End(access))

    def signal(self, stream: Stream, word: Word, value: int) -> None:
        """See ``Device.signal``."""
        self._enqueue(self._agent(stream), Signal(word.name, wrap(value)))

    def wait(self, stream: Stream, word: Word, value: int) -> None:
        """See ``Device.wait``."""
        agent = self._agent(stream)
        if not self._leaves_out(agent):
            self._enqueue(agent, Wait(word.name, wrap(value)))

    def record(self, stream: Stream, event: Event) -> None:
        """See ``Device.record``."""
        agent = self._agent(stream)
        self._check_held(event)
        if self._held_events[event]:
            raise DeviceError(f"{event} is already recorded")
        self._held_events[event] = True
        self._enqueue(agent, Record(event))

    def wait_event(self, stream: Stream, event: Event) -> None:
        """See ``Device.wait_event``."""
        agent = self._agent(stream)
        self._check_held(event)
        if not self._held_events[event]:
            raise UnrecordedEventError(f"{event} is not recorded")
        if not self._leaves_out(agent):
            self._enqueue(agent, WaitEvent(event))

    def is_done(self, event: Event) -> bool:
        """See ``Device.is_done``."""
        self._check_held(event)
        return self._held_events[event] and bool(self._ask(AskDone(event)))

    def launch(
        self,
        stream: Stream,
        compute: Callable[[], None],
        *,
        reads: Sequence[Buffer] = (),
        writes: Sequence[Buffer] = (),
    ) -> None:
        """See ``Device.launch``."""
        agent = self._agent(stream)
        if self._leaves_out(agent):
            return
        access = self._tape.access(agent, "launch", reads, writes)
        self._enqueue(agent, Begin(access))
        outer, self._launching = self._launching, agent
        try:
            compute()
        except Exception as error:
            if agent not in self._adopted:
                self._failures.setdefault(agent, f"stream {stream.name}: {error!r}")
            raise
        finally:
            self._launching = outer
            self._enqueue(agent, End(access))

    def synchronize(self, stream: Stream | None = None, *, timeout_s: float) -> None:
        """See ``Device.synchronize``."""
        self._check_open()
        agents = list(self._streams.values()) if stream is None else [self._agent(stream)]
        self._join(agents)
        failures = [self._failures.pop(agent) for agent in list(self._failures) if agent in agents]
        if failures:
            raise DeviceError(failures[0])

    def close(self, *, timeout_s: float = 5.0) -> None:
        """Come to the end of all streams; what is still held then is a ``MISSING_RELEASE``."""
        if self._is_closed:
            return
        self._join(list(self._streams.values()))
        self._is_closed = True

    def _check_open(self) -> None:
        if self._is_closed:
            raise DeviceError("the device is closed")

    def _check_held(self, event: Event) -> None:
        self._check_open()
        if event not in self._held_events:
            raise DeviceError(f"{event} was released, or belongs to another device")

    def _agent(self, stream: Stream) -> int:
        self._check_open()
        if stream.index not in self._streams:
            raise DeviceError(f"{stream} belongs to another device")
        agent = self._streams[stream.index]
        if self._launching is not None and agent != self._launching:
            raise DeviceError(f"a launch enqueues on another stream, {stream.name}")
        return agent

    def _leaves_out(self, agent: int) -> bool:
        has_failed = agent in self._failures
        self.num_left_out += has_failed
        return has_failed

    def _join(self, agents: Sequence[int]) -> None:
        targets = tuple((agent, len(self._tape.steps[agent])) for agent in agents)
        self._tape.add(HOST, Join(targets))

    def _enqueue(self, agent: int, *steps: Step) -> None:
        self._has_operations = True
        for step in steps:
            self._tape.add(agent, step)
        self._tape.add(HOST, Issue(agent, len(self._tape.steps[agent])))

    def _add_anywhere(self, stream: Stream | None, step: Step) -> None:
        if stream is None:
            self._tape.add(HOST, step)
        else:
            self._enqueue(self._agent(stream), step)

    def _ask(self, question: AskDone) -> int:
        self._tape.add(HOST, question)
        self._num_asked += 1
        if self._num_asked > len(self._answers):
            self._is_open = True
            raise UnansweredError
        return self._answers[self._num_asked - 1]


class Recording:
    """The programs of one host: a function that makes its calls on the device given to it.

    It is called again for other answers to its questions, and must make the same calls up to the
    first that differs.
    """

    def __init__(self, host: Callable[[SymbolicDevice], None]) -> None:
        self._host = host
        self._programs: dict[tuple[int, ...], Program] = {}

    def program(self, answers: tuple[int, ...] = ()) -> Program:
        """The program given these answers."""
        if answers not in self._programs:
            device = SymbolicDevice(answers)
            with contextlib.suppress(UnansweredError):
                self._host(device)
            self._programs[answers] = device.program()
        return self._programs[answers]

"""Faults of a program of the symbolic device that do not depend on the order of its steps."""

from collections.abc import Iterator

from corun.gpu.device.base import Event
from corun.shm.words import has_reached
from support.streams.symbolic_findings import (
    Finding,
    MissingRelease,
    SignalBackwards,
    TwoWriters,
    WordBetweenStreams,
)
from support.streams.symbolic_program import HOST, Agent, Issue, Join, Program, Record, Signal, Step, Wait


def static_findings(program: Program) -> Iterator[Finding]:
    """Findings from the queues alone."""
    yield from _word_findings(program)
    if program.is_closed and program.held:
        yield MissingRelease(program.held)


def _word_findings(program: Program) -> Iterator[Finding]:
    writers: dict[str, list[Agent]] = {}
    for agent in program.agents:
        values = dict(program.initial_words)
        for step in agent.steps:
            if not isinstance(step, Signal):
                continue
            if agent not in writers.setdefault(step.word, []):
                writers[step.word].append(agent)
            if not has_reached(step.value, values[step.word]):
                yield SignalBackwards(agent.name, step.word, step.value, values[step.word])
            values[step.word] = step.value
    for word, agents in writers.items():
        if len(agents) > 1:
            yield TwoWriters(word, tuple(agent.name for agent in agents))
        yield from _between_streams(program, word, agents[0])


def _between_streams(program: Program, word: str, writer: Agent) -> Iterator[Finding]:
    for waiter in program.agents:
        is_pair = writer.is_stream and waiter.is_stream and waiter is not writer
        if is_pair and any(isinstance(step, Wait) and step.word == word for step in waiter.steps):
            yield WordBetweenStreams(word, writer.name, waiter.name)


def in_one_queue(program: Program) -> Program:
    """The same program on a device that runs the streams' steps one by one, in order of issue."""
    streams = [index for index, agent in enumerate(program.agents) if agent.is_stream]
    queue = len(program.agents)
    merged: list[Step] = []
    places: dict[tuple[int, int], int] = {}  # stream and step, to the step in the one queue
    issued = dict.fromkeys(streams, 0)
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
    agents = (
        Agent(program.agents[HOST].name, tuple(host)),
        *others,
        Agent("the one queue", tuple(merged), is_stream=True),
    )
    return Program(
        agents,
        program.initial_words,
        num_answers=program.num_answers,
        is_open=program.is_open,
        records=find_records(agents),
    )


def find_records(agents: tuple[Agent, ...]) -> dict[Event, tuple[int, int]]:
    """Where each event is recorded: agent and step."""
    return {
        step.event: (index, position)
        for index, agent in enumerate(agents)
        for position, step in enumerate(agent.steps)
        if isinstance(step, Record)
    }

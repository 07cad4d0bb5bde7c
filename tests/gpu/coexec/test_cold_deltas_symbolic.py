"""Passes of cold rows in every legal order: the code that serves, on the symbolic device."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import pytest
from corun.cpu_workers.teams import TeamJob
from corun.gpu.coexec.assistant import AssistedPass
from corun.gpu.coexec.cold_deltas import ColdDeltas
from corun.gpu.coexec.gateway import WorkerGateway
from corun.gpu.coexec.handover import Exchange, StreamHandover
from corun.gpu.coexec.invocation import Invocation
from corun.gpu.device.base import DeviceError, Stream
from corun.shm.errors import RowsFullError, WorkerUnavailableError
from corun.shm.job import Job
from hypothesis import given, settings
from support.streams.symbolic_coexec import Shape, SymbolicEngine, recording
from support.streams.symbolic_order import Kind, check, kinds

SMALL = Shape()
THREE_LAYERS = Shape(num_layers=3, group_of_layer=(0, 0, 0))


def assisted_prefill(split_layer: int, *, is_gradual: bool = False) -> Callable[[SymbolicEngine], None]:
    """A cold request: one pass while its adapter is loaded, and a warm one."""

    def live(engine: SymbolicEngine) -> None:
        copied = engine.fetch("a")
        engine.start(copied, is_gradual=is_gradual)
        if is_gradual:
            copied.enqueue_all()
        engine.run(split_layer, copied)
        engine.finish(copied)
        engine.run(0, None)
        engine.evict()

    return live


@pytest.mark.parametrize("streams", ["apart", "one", "adopted"])
@pytest.mark.parametrize("split_layer", [0, 1, 2])
@pytest.mark.parametrize("copies_y", [False, True])
def test_a_split_anywhere_is_right_in_every_order(streams: str, split_layer: int, copies_y: bool) -> None:
    shape = replace(SMALL, streams=streams, copies_y=copies_y)
    check(recording(shape, assisted_prefill(split_layer)))


@pytest.mark.parametrize(
    "shape",
    [
        replace(SMALL, num_groups=2),
        replace(SMALL, num_workers=2),
        replace(SMALL, group_of_layer=(0, 0)),
        replace(SMALL, num_layers=3, group_of_layer=(0, 1, 1)),
        replace(SMALL, reads_rows=True),
        replace(SMALL, num_groups=2, streams="one"),
    ],
    ids=str,
)
def test_shapes_are_right_in_every_order(shape: Shape) -> None:
    check(recording(shape, assisted_prefill(1)))


@pytest.mark.parametrize("streams", ["apart", "one", "adopted"])
def test_a_prefetch_that_is_promoted(streams: str) -> None:
    shape = replace(SMALL, streams=streams)
    check(recording(shape, assisted_prefill(1, is_gradual=True)))


@settings(derandomize=True, deadline=None, database=None, max_examples=20)
@given(data=st.data())
def test_larger_ones_are_right_in_any_order(data: st.DataObject) -> None:
    num_layers = data.draw(st.integers(2, 5))
    cuts = data.draw(st.lists(st.integers(0, 1), min_size=num_layers - 1, max_size=num_layers - 1))
    group_of_layer = tuple(sum(cuts[:layer]) for layer in range(num_layers))
    shape = Shape(
        num_layers=num_layers,
        num_groups=data.draw(st.integers(1, 3)),
        group_of_layer=group_of_layer,
        num_workers=data.draw(st.integers(1, 3)),
        streams=data.draw(st.sampled_from(["apart", "one", "adopted"])),
        copies_y=data.draw(st.booleans()),
        reads_rows=data.draw(st.booleans()),
        dies_in=tuple(data.draw(st.sets(st.integers(0, 12), max_size=2))),
    )
    split_layer = data.draw(st.integers(0, num_layers))
    is_gradual = data.draw(st.booleans())
    check(recording(shape, assisted_prefill(split_layer, is_gradual=is_gradual)))


def failing_worker(engine: SymbolicEngine) -> None:
    """Its jobs are void, the row runs again without workers; the next row has a new worker."""
    copied = engine.fetch("a")
    engine.start(copied)
    assert not engine.run(2, copied, samples=False), "a result counts that nobody computed"
    assert engine.run(0, copied)
    assert engine.run(2, copied)
    engine.finish(copied)
    engine.evict()


@pytest.mark.parametrize("streams", ["apart", "one", "adopted"])
@pytest.mark.parametrize("dies_in", [(0,), (1,)])
def test_a_worker_that_dies_voids_the_pass_and_holds_nothing(streams: str, dies_in: tuple[int, ...]) -> None:
    shape = replace(SMALL, streams=streams, dies_in=dies_in, group_of_layer=(0, 0))
    check(recording(shape, failing_worker))


def broken_off_publishing(engine: SymbolicEngine) -> None:
    """A worker has died in a pass that the accelerator has yet to signal, when publishing the next
    pass fails: no wait depends on values that those signals overwrite.
    """
    copied = engine.fetch("a")
    engine.start(copied)
    assert not engine.run(2, copied, samples=False)
    submit = engine.pool.submit

    def broken(tasks: Sequence[TeamJob]) -> list[Job]:
        submit(tasks)
        raise WorkerUnavailableError("it went just now")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.pool, "submit", broken)
        with pytest.raises(WorkerUnavailableError):
            engine.begin(2, copied)
    assert engine.run(2, copied)
    engine.finish(copied)
    engine.evict()


@pytest.mark.parametrize("streams", ["apart", "one", "adopted"])
def test_publishing_that_is_broken_off_lets_workers_go(streams: str) -> None:
    shape = replace(SMALL, streams=streams, dies_in=(0,), group_of_layer=(0, 0))
    check(recording(shape, broken_off_publishing))


def failing_pass(layer: int, before: str) -> Callable[[SymbolicEngine], None]:
    """The model raises while workers wait for x; then another pass, with the same slots."""

    def live(engine: SymbolicEngine) -> None:
        copied = engine.fetch("a")
        engine.start(copied)
        assisted = engine.begin(engine.shape.num_layers, copied)
        with pytest.raises(ArithmeticError):
            engine.forward(assisted.deltas, ((layer, 0), before))
        assisted.abandon()
        assert not engine.pool.num_outstanding
        assert engine.run(1, copied)
        engine.finish(copied)
        engine.evict()

    return live


@pytest.mark.parametrize("streams", ["apart", "one", "adopted"])
@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("before", ["begin", "add", "compute", "exchange"])
def test_a_pass_that_raises_lets_its_workers_go(streams: str, layer: int, before: str) -> None:
    shape = replace(THREE_LAYERS, streams=streams)
    check(recording(shape, failing_pass(layer, before)))


def test_more_tokens_than_rows_are_refused_before_anything_is_published() -> None:
    def live(engine: SymbolicEngine) -> None:
        copied = engine.fetch("a")
        engine.start(copied)
        with pytest.raises(RowsFullError, match=r"a pass has 9 tokens .* room for 8"):
            engine.begin(1, copied, num_tokens=9)
        assert engine.pool.num_published == 0
        assert engine.run(0, copied)
        engine.finish(copied)
        engine.evict()

    check(recording(SMALL, live))


# The findings that each mistake leads to, in some order.


@contextmanager
def replaced(owner: type, name: str, value: object) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, value)
        yield


_order = Exchange.order


def _order_only_to_compute(self: Exchange, first: Stream, then: Stream) -> None:
    if then == self.compute:
        _order(self, first, then)


def _order_only_from_compute(self: Exchange, first: Stream, then: Stream) -> None:
    if first == self.compute:
        _order(self, first, then)


def _order_by_released_event(self: Exchange, first: Stream, then: Stream) -> None:
    event = self.device.event()
    self.device.record(first, event)
    self.device.release_event(event)
    self.device.wait_event(then, event)


def _signal_before_copy(self: StreamHandover, invocation: Invocation, x: Any) -> None:
    exchange = self.exchange
    exchange.device.signal(exchange.transfer, invocation.ready, invocation.sequence)
    exchange.device.copy(exchange.transfer, invocation.x, x)


def _add_before_wait(self: ColdDeltas, invocations: Sequence[Invocation], ys: Sequence[Any]) -> None:
    for invocation in invocations:
        self._handover.add(invocation, ys)
        self._handover.wait(invocation)
        self._handover.end()


def _release_out_of_order(self: ColdDeltas) -> None:
    exchange = self._exchange
    for invocations in self._plan.invocations.values():
        for invocation in invocations:
            if id(invocation) not in self._sent:
                exchange.device.signal(exchange.transfer, invocation.ready, invocation.sequence)


def _nothing(*_: object, **__: object) -> None:
    pass


def _drop_by_own_stores(self: Any) -> None:
    pool = self._pool
    if pool.num_outstanding:
        pool.host.signal(pool.ready, pool.newest_sequence)
    self.collect({}, timeout_s=1.0)


_UNWRITTEN, _UNORDERED = Kind.UNWRITTEN, Kind.UNORDERED
_LOST = replace(SMALL, dies_in=(0,), group_of_layer=(0, 0))
# What is replaced, by what, and the expected findings; with another life than an assisted prefill.
MISTAKES: dict[str, tuple[Any, ...]] = {
    "x is too early": (Exchange, "order", _order_only_to_compute, {_UNWRITTEN, _UNORDERED}),
    "y is added before it is there": (Exchange, "order", _order_only_from_compute, {_UNORDERED}),
    "the worker is told before x is there": (StreamHandover, "send", _signal_before_copy, {_UNORDERED}),
    "y is added before the wait": (ColdDeltas, "_take_in", _add_before_wait, {_UNORDERED}),
    "a layer group is not waited for": (
        *(ColdDeltas, "_await_layer", _nothing),
        {_UNWRITTEN, _UNORDERED, Kind.USE_AFTER_HAND_ON},
    ),
    "workers go on while an earlier y is read": (
        *(ColdDeltas, "release_workers", _release_out_of_order, {_UNORDERED}),
        *(THREE_LAYERS, failing_pass(1, "begin")),
    ),
    "somebody else stores what the accelerator signals": (
        *(WorkerGateway, "_drop_published", _drop_by_own_stores, {Kind.TWO_WRITERS}),
        *(_LOST, broken_off_publishing),
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_found(name: str) -> None:
    owner, method, value, expected, *other = MISTAKES[name]
    shape, live = other or (SMALL, assisted_prefill(1))
    with replaced(owner, method, value):
        found = kinds(recording(shape, live))
    assert found == expected


def test_an_event_that_is_released_early_is_refused() -> None:
    with (
        replaced(Exchange, "order", _order_by_released_event),
        pytest.raises(DeviceError, match="was released"),
    ):
        check(recording(SMALL, assisted_prefill(1)))


def test_a_pass_that_is_not_settled_keeps_workers_in_the_arena() -> None:
    """The load's end releases the reference that protects the memory that workers read."""

    def live(engine: SymbolicEngine) -> None:
        copied = engine.fetch("a")
        engine.start(copied)
        with replaced(AssistedPass, "finish", lambda self: frozenset()):
            engine.run(2, copied, samples=False)
        copied.cancel()
        engine.evict()

    assert Kind.USE_AFTER_HAND_ON in kinds(recording(SMALL, live))

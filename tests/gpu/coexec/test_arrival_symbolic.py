"""Loads and their ends in every legal order: no memory is used after it was passed on."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import pytest
from corun.gpu.adapters.arrival import Copied
from corun.gpu.adapters.copier import AdapterCopier
from corun.gpu.device.base import UnrecordedEventError
from hypothesis import given, settings
from support.streams.symbolic_coexec import Shape, SymbolicEngine, recording
from support.streams.symbolic_order import Kind, check, kinds

SMALL = Shape()
Life = Callable[[SymbolicEngine], None]


def gradual(engine: SymbolicEngine) -> None:
    """A prefetch moves group by group, on polls; no request needs it before it has arrived."""
    copied = engine.fetch("a")
    engine.start(copied, is_gradual=True)
    copied.advance()
    assert copied.num_arrived() in (0, 1, 2)
    engine.device.synchronize(timeout_s=1)
    copied.advance()
    engine.device.synchronize(timeout_s=1)
    engine.finish(copied)
    engine.run(0, None)
    engine.evict()


def promoted_midway(engine: SymbolicEngine) -> None:
    copied = engine.fetch("a")
    engine.start(copied, is_gradual=True)
    copied.advance()
    copied.enqueue_all()
    engine.run(1, copied)
    engine.finish(copied)
    engine.evict()


def cancelled(engine: SymbolicEngine) -> None:
    """Cancelled with copies running: its memory may be reused at once."""
    copied = engine.fetch("a")
    engine.start(copied, is_gradual=True)
    copied.cancel()
    engine.evict()
    other = engine.fetch("b")
    engine.start(other)
    engine.finish(other)
    engine.evict()


def aborted(engine: SymbolicEngine) -> None:
    """The request ends in mid-prefill, without waiting for its chunk's end; then its adapter is
    evicted, and another one is loaded to its memory.
    """
    copied = engine.fetch("a")
    engine.start(copied)
    engine.run(1, copied, samples=False)
    engine.finish(copied)
    engine.run(0, None, samples=False)
    engine.evict()
    other = engine.fetch("b")
    engine.start(other)
    engine.finish(other)
    engine.evict()


def replaced_after_a_chunk(engine: SymbolicEngine) -> None:
    """The same with a resident adapter."""
    copied = engine.fetch("a")
    engine.start(copied)
    engine.finish(copied)
    engine.run(0, None, samples=False)
    engine.evict()
    other = engine.fetch("b")
    engine.start(other)
    engine.finish(other)
    engine.evict()


def unloaded_while_loading(engine: SymbolicEngine) -> None:
    """Its load continues; it is evicted after the load and the request's step have ended."""
    copied = engine.fetch("a")
    engine.start(copied)
    assisted = engine.begin(1, copied)
    engine.forward(assisted.deltas)
    assert not assisted.finish()
    engine.finish(copied)
    engine.evict()
    other = engine.fetch("b")
    engine.start(other)
    engine.finish(other)
    engine.evict()


def read_in_a_pass(engine: SymbolicEngine) -> None:
    """Only the first layer is available; workers and copies get the others as they are read."""
    copied = engine.fetch("a", num_whole=engine.shape.num_groups)
    engine.start(copied)
    engine.run(engine.shape.num_layers, copied)
    assert not copied.has_failed()
    engine.finish(copied)
    engine.evict()


def read_before_a_pass(engine: SymbolicEngine) -> None:
    """No layer is available at its start; later ones are copied on polls."""
    copied = engine.fetch("a", num_whole=0)
    engine.start(copied)
    host = engine.host
    for num_whole in range(1, len(host.regions) + 1):
        host.read(num_whole)
        copied.enqueue_all()
    engine.run(1, copied)
    engine.finish(copied)
    engine.evict()


LIVES: tuple[Life, ...] = (
    gradual,
    promoted_midway,
    cancelled,
    aborted,
    replaced_after_a_chunk,
    unloaded_while_loading,
    read_in_a_pass,
    read_before_a_pass,
)


@pytest.mark.parametrize("life", LIVES)
@pytest.mark.parametrize("reads_rows", [False, True])
def test_it_is_right_in_every_order(life: Life, reads_rows: bool) -> None:
    check(recording(replace(SMALL, reads_rows=reads_rows), life))


@settings(derandomize=True, deadline=None, database=None, max_examples=20)
@given(data=st.data())
def test_larger_ones_are_right_in_any_order(data: st.DataObject) -> None:
    shape = Shape(
        num_layers=4,
        num_groups=data.draw(st.integers(1, 2)),
        group_of_layer=data.draw(st.sampled_from([(0, 0, 1, 1), (0, 1, 1, 1)])),
        num_workers=data.draw(st.integers(1, 2)),
        streams=data.draw(st.sampled_from(["apart", "one", "adopted"])),
        copies_y=data.draw(st.booleans()),
        reads_rows=data.draw(st.booleans()),
    )
    check(recording(shape, data.draw(st.sampled_from(LIVES))))


def _let_go_at_once(self: Copied) -> None:
    for group in self._groups:
        if group.event is not None:
            self._copier.device.release_event(group.event)
    self._host.release()


def _nothing(*_: object, **__: object) -> None:
    pass


def _enqueue_without_record(self: Any, group: Any) -> None:
    self._copy_regions(group)
    group.has_arrived = True
    group.is_enqueued = True


def _does_not_look(self: Any, group: object) -> bool:
    return True


def _give_only_events_back(self: Copied) -> None:
    for group in self._groups:
        if group.event is not None:
            self._copier.device.release_event(group.event)


def _give_only_the_reference_back(self: Copied) -> None:
    self._host.release()


def finished_early(engine: SymbolicEngine) -> None:
    """Like a loader that does not check whether it has arrived."""
    copied = engine.fetch("a")
    engine.start(copied)
    copied.finish()
    engine.device.synchronize(timeout_s=1)
    engine.evict()


def evicted_early(engine: SymbolicEngine) -> None:
    """While its copies are running; the next load uses another stream."""
    copied = engine.fetch("a")
    engine.start(copied)
    memory = engine.memory[0]
    for buffer in memory.buffers:
        engine.device.symbolic.give_back(buffer)
    del engine.memory[0]
    engine.finish(copied)


_USED, _TAKEN, _KEPT = Kind.USE_AFTER_HAND_ON, Kind.SLOT_IN_USE, Kind.MISSING_RELEASE
CARELESS: dict[Life, set[Kind]] = {finished_early: {_USED}, evicted_early: {_USED, _TAKEN}}
# What is replaced, by what, the life to run, and the expected findings.
MISTAKES: dict[str, tuple[type, str, object, Life, set[Kind]]] = {
    "an end is not waited for": (Copied, "cancel", _let_go_at_once, cancelled, {_USED, _TAKEN}),
    "readers are not": (AdapterCopier, "await_readers", _nothing, replaced_after_a_chunk, {_USED}),
    "a part is copied": (
        Copied,
        "_may_enqueue",
        _does_not_look,
        read_in_a_pass,
        {Kind.UNWRITTEN, Kind.UNORDERED},
    ),
    "workers read a part": (Copied, "begin_pass", lambda self: 99, read_in_a_pass, {Kind.UNWRITTEN}),
    "workers do not wait": (Copied, "await_read", _nothing, read_in_a_pass, {Kind.UNWRITTEN}),
    "they wait for less": (Copied, "await_read", Copied._await_regions, read_in_a_pass, {Kind.UNWRITTEN}),
    "the reference is kept": (Copied, "_release_host", _give_only_events_back, gradual, {_KEPT}),
    "events are kept": (Copied, "_release_host", _give_only_the_reference_back, gradual, {_KEPT}),
}


@pytest.mark.parametrize("life", CARELESS)
def test_a_careless_life_is_found(life: Life) -> None:
    assert kinds(recording(SMALL, life)) == CARELESS[life]


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, method, value, life, expected = MISTAKES[name]
    monkeypatch.setattr(owner, method, value)
    assert kinds(recording(SMALL, life)) == expected


def test_a_layer_group_that_nothing_records_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Copied, "_enqueue", _enqueue_without_record)
    with pytest.raises(UnrecordedEventError):
        check(recording(SMALL, promoted_midway))

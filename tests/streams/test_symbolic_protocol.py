"""Assisted prefill is right in every legal order, and each mistake in it is found."""

import hypothesis.strategies as st
import pytest
from corun.gpu.device.base import DeviceError, UnrecordedEventError
from hypothesis import Phase, given, settings
from support.streams.symbolic_explore import explore
from support.streams.symbolic_findings import (
    Finding,
    Hang,
    HangInOneQueue,
    MissingRelease,
    Overlap,
    OverwriteBeforeRead,
    ProtocolError,
    ReadBeforeWrite,
    SignalBackwards,
    TwoWriters,
    UseAfterHandOn,
    WordBetweenStreams,
)
from support.streams.symbolic_programs import choosers
from support.streams.symbolic_protocol import Mistake, Sizes, assisted_prefill
from support.streams.symbolic_run import Chooser, run

SMALL = Sizes(num_layers=3, split_layer=2, num_descriptors=1)
SLICED = Sizes(num_layers=2, split_layer=1, num_slices=2)

# Mistakes that a device refuses at once.
REFUSED: dict[Mistake, type[DeviceError]] = {
    Mistake.LOADED_AFTER_COMPUTE: UnrecordedEventError,
    Mistake.EVENT_KEPT_TOO_LONG: DeviceError,
}

# All kinds that a mistake leads to, in one order or another.
FOUND: dict[Mistake, set[type[Finding]]] = {
    Mistake.SIGNAL_BEFORE_COPY: {ReadBeforeWrite},
    Mistake.X_IS_NOT_AWAITED: {ReadBeforeWrite, Overlap},
    Mistake.DONE_IS_NOT_AWAITED: {ReadBeforeWrite, Overlap},
    Mistake.Y_IS_NOT_AWAITED: {ReadBeforeWrite, Overlap},
    Mistake.LOAD_IS_NOT_AWAITED: {ReadBeforeWrite, Overlap},
    Mistake.RING_TOO_SHALLOW: {ReadBeforeWrite, OverwriteBeforeRead, Overlap},
    Mistake.PUBLISHED_BEFORE_WRITTEN: {ReadBeforeWrite},
    Mistake.DESCRIPTOR_HANDED_ON_EARLY: {UseAfterHandOn},
    Mistake.PAGES_HANDED_ON_EARLY: {UseAfterHandOn},
    Mistake.WORKER_NEVER_SIGNALS: {Hang},
    Mistake.WORKER_SIGNALS_EARLY: {ReadBeforeWrite, Overlap, UseAfterHandOn},
    Mistake.PUBLISHED_AFTER_SYNCHRONIZING: {Hang},
    Mistake.DONE_HAS_TWO_WRITERS: {TwoWriters},
    Mistake.DONE_GOES_BACK: {SignalBackwards},
    Mistake.PAGES_KEPT: {MissingRelease},
    Mistake.EVENTS_KEPT: {MissingRelease},
    Mistake.WORD_INSTEAD_OF_EVENT: {WordBetweenStreams},
    Mistake.WAIT_ISSUED_BEFORE_SIGNAL: {HangInOneQueue},
}


@pytest.mark.parametrize(
    "sizes",
    [
        Sizes(num_layers=2, split_layer=0),
        Sizes(num_layers=2, split_layer=2),
        Sizes(num_layers=4, split_layer=2, layers_per_group=2),
        SMALL,
        SLICED,
        Sizes(num_layers=3, split_layer=2, num_slices=2, ring_depth=2),
    ],
    ids=str,
)
def test_it_is_right_in_every_order(sizes: Sizes) -> None:
    explored = explore(assisted_prefill(sizes))
    explored.check()
    assert explored.num_orders > 10


def test_it_is_right_in_every_order_without_reduction() -> None:
    sizes = Sizes(num_layers=2, split_layer=1)
    reduced = explore(assisted_prefill(sizes))
    explored = explore(assisted_prefill(sizes), is_reduced=False)
    explored.check()
    assert explored.num_orders > reduced.num_orders > 10**6


@settings(derandomize=True, deadline=None, database=None, max_examples=60)
@given(
    sizes=st.builds(
        Sizes,
        num_layers=st.integers(6, 8),
        split_layer=st.integers(0, 6),
        layers_per_group=st.integers(1, 3),
        num_slices=st.integers(1, 3),
        ring_depth=st.integers(1, 3),
        num_descriptors=st.integers(3, 4),
    ),
    chooser=choosers(num_agents=5, num_steps=300),
)
def test_larger_ones_are_right_in_any_order(sizes: Sizes, chooser: Chooser) -> None:
    run(assisted_prefill(sizes), chooser)


def _sizes(mistake: Mistake) -> Sizes:
    return SLICED if mistake is Mistake.RING_TOO_SHALLOW else SMALL


@pytest.mark.parametrize("mistake", FOUND)
def test_a_mistake_is_found(mistake: Mistake) -> None:
    explored = explore(assisted_prefill(_sizes(mistake), mistake))
    assert explored.kinds == FOUND[mistake]
    for error in explored.errors:
        assert str(error).startswith(f"{type(error.finding).__name__}: {error.finding}")


@pytest.mark.parametrize("mistake", REFUSED)
def test_a_mistake_is_refused(mistake: Mistake) -> None:
    with pytest.raises(REFUSED[mistake]):
        explore(assisted_prefill(SMALL, mistake))


def test_no_mistake_is_left_out() -> None:
    assert FOUND.keys() | REFUSED.keys() == set(Mistake)
    assert not FOUND.keys() & REFUSED.keys()


@pytest.mark.parametrize("mistake", FOUND)
def test_drawn_orders_find_a_mistake_too(mistake: Mistake) -> None:
    """With few orders, so this is about how they are drawn."""

    @settings(
        derandomize=True,
        deadline=None,
        database=None,
        max_examples=200,
        phases=[Phase.generate],
        report_multiple_bugs=False,
    )
    @given(choosers(num_agents=5, num_steps=100))
    def draw(chooser: Chooser) -> None:
        run(assisted_prefill(_sizes(mistake), mistake), chooser)

    with pytest.raises(ProtocolError) as caught:
        draw()
    assert type(caught.value.finding) in FOUND[mistake]

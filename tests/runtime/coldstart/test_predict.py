"""The split layer: compared with all splits, and in the main cases."""

from dataclasses import replace

from corun.runtime.coldstart.cold import LayerTimes
from corun.runtime.coldstart.predict import choose_split, end_of
from hypothesis import given, settings
from hypothesis import strategies as st

_SECONDS = st.integers(0, 50).map(float)


@st.composite
def _times(draw: st.DrawFn) -> LayerTimes:
    num_layers = draw(st.integers(1, 8))
    columns = [tuple(draw(st.lists(_SECONDS, min_size=num_layers, max_size=num_layers))) for _ in range(5)]
    return LayerTimes(*columns)


def _run(times: LayerTimes, split: int) -> float:
    """Simulate the layers as on a device."""
    now_s = 0.0
    for layer in range(times.num_layers):
        now_s = max(now_s, times.held_s[layer])
        if layer < split:
            now_s = max(now_s, times.read_s[layer]) + times.assisted_s[layer]
        else:
            now_s = max(now_s, times.ready_s[layer]) + times.device_s[layer]
    return now_s


@settings(max_examples=300, deadline=None, derandomize=True)
@given(_times())
def test_no_other_split_ends_sooner(times: LayerTimes) -> None:
    ends = [_run(times, split) for split in range(times.num_layers + 1)]
    best = choose_split(times)
    assert best.end_s == min(ends)
    assert best.layer == ends.index(min(ends))
    assert [end_of(times, split) for split in range(times.num_layers + 1)] == ends


def test_a_resident_adapter_needs_no_worker() -> None:
    times = LayerTimes((1.5,) * 4, (1.0,) * 4, *[(0.0,) * 4] * 3)
    assert choose_split(times).layer == 0


def test_workers_take_the_layers_that_the_link_is_too_late_for() -> None:
    # A layer every 2 s over the link, 1 s of computing: the workers keep ahead of the link.
    times = LayerTimes((1.0,) * 6, (1.0,) * 6, (2.0, 4.0, 6.0, 8.0, 10.0, 12.0), *[(0.0,) * 6] * 2)
    best = choose_split(times)
    assert (best.layer, best.end_s) == (6, 6.0)


def test_slow_workers_hand_over_in_the_middle() -> None:
    times = LayerTimes((3.0,) * 6, (1.0,) * 6, (5.0,) * 6, *[(0.0,) * 6] * 2)
    best = choose_split(times)
    # One layer by the workers ends at 3; the rest waits until 5 and takes 5.
    assert (best.layer, best.end_s) == (1, 10.0)


def test_no_workers_means_no_layer_for_them() -> None:
    infinite = float("inf")
    times = LayerTimes((infinite,) * 3, (1.0,) * 3, (9.0,) * 3, *[(0.0,) * 3] * 2)
    assert choose_split(times).layer == 0


def test_a_layer_that_others_hold_needs_no_worker() -> None:
    times = LayerTimes((1.5,) * 4, (1.0,) * 4, (4.0,) * 4, (4.0,) * 4, (0.0,) * 4)
    best = choose_split(times)
    assert (best.layer, best.end_s) == (0, 8.0)


def test_workers_compute_each_layer_once_it_is_read() -> None:
    read_s = (1.0, 2.0, 3.0, 4.0)
    times = LayerTimes((1.5,) * 4, (1.0,) * 4, (9.0,) * 4, (0.0,) * 4, read_s)
    best = choose_split(times)
    assert (best.layer, best.end_s) == (4, 7.0), "each layer is read while the one before is computed"
    assert choose_split(replace(times, read_s=(9.0,) * 4)).layer == 0

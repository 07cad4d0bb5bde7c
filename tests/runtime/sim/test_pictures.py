"""All pictures have a title, a foot and names that do not overlap anything."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from corun.runtime.sim import pictures
from corun.runtime.sim.pictures import SHARES, FirstTokenCurve, LoadPoint, LoadsOverTime, MemoryOverTime
from matplotlib.figure import Figure
from matplotlib.text import Text

TITLE = "At 8 requests/s 95 % of first tokens come within 1.2 s with corun, 4.5 s with slora"
FOOT = "Simulated, not measured. Machine: a40-llama7b. Workload: S1, 500 requests a run, seeds 1 to 3."
NAMES = ("scheduling-policy=corun", "scheduling-policy=chameleon", "scheduling-policy=fcfs")


def first_tokens(path: Path) -> None:
    rng = np.random.default_rng(0)
    times_s = [rng.lognormal(0.0, 1.0, 200) for _ in NAMES]
    curves = {
        name: FirstTokenCurve(np.percentile(times, SHARES), float(np.percentile(times, 95)))
        for name, times in zip(NAMES, times_s, strict=True)
    }
    pictures.draw_first_tokens(curves, 95.0, 2.0, TITLE, FOOT, path)


def loads(path: Path) -> None:
    curves = {
        name: [
            LoadPoint(rate, rate**2 * (1 + 0.01 * i), rate**2 * 0.9, rate**2 * 1.2)
            for rate in (1.0, 1.5, 2.0)
        ]
        for i, name in enumerate(NAMES)
    }
    pictures.draw_load_curve(curves, 95.0, 3.98, TITLE, FOOT, path)


def memory(path: Path) -> None:
    kinds = {"running_kv": [1, 2, 0], "history_kv": [5, 5, 0], "adapters": [3, 3, 9], "free": [1, 0, 1]}
    num_bytes = {kind: [one << 30 for one in values] for kind, values in kinds.items()}
    pictures.draw_memory(MemoryOverTime([0.0, 1.0, 2.0], num_bytes), TITLE, FOOT, path)


def parts(path: Path) -> None:
    names = ("order", "kv_memory", "adapter_load", "compute", "co_scheduled", "step_budget", "disk_read")
    of_rank = {str(rank): {name: 0.001 * rank for name in names} for rank in (8, 16, 32, 64, 128)}
    pictures.draw_parts(of_rank, TITLE, FOOT, path)


def servers(path: Path) -> None:
    rng = np.random.default_rng(0)
    loads = rng.integers(0, 40, (60, 200)).tolist()
    times_s = [0.5 * index for index in range(200)]
    pictures.draw_server_loads(LoadsOverTime(times_s, loads), TITLE, FOOT, path)


def idle_servers(path: Path) -> None:
    loads = LoadsOverTime([0.0, 1.0], [[0, 0], [0, 0]])
    pictures.draw_server_loads(loads, TITLE, FOOT, path)


@pytest.fixture
def saved(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    found: list[Figure] = []
    save = Figure.savefig

    def save_and_keep(figure: Figure, *arguments: Any, **options: Any) -> None:
        save(figure, *arguments, **options)
        found.append(figure)

    monkeypatch.setattr(Figure, "savefig", save_and_keep)
    return found


def drawn_texts(figure: Figure) -> list[Text]:
    """All but ticks out of the axes' range, which have a place and are not drawn."""
    undrawn = set()
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            ticks = [*axis.get_major_ticks(), *axis.get_minor_ticks()]
            undrawn |= {one.label1 for one in ticks if not low <= one.get_loc() <= high}
    texts = [one for one in figure.findobj(Text) if isinstance(one, Text) and one not in undrawn]
    return [one for one in texts if one.get_visible() and one.get_text().strip()]


def test_a_number_keeps_its_unit_and_a_name_is_whole(tmp_path: Path, saved: list[Figure]) -> None:
    title = f"{'x' * 79} 1.92 s with {'y' * 60} scheduling-policy=corun"
    pictures.draw_load_curve({"a": [LoadPoint(1.0, 1, 1, 1)]}, 95, None, title, FOOT, tmp_path / "p")
    (written,) = [one.get_text() for one in drawn_texts(saved[0]) if one.get_text()[0] == "x"]
    first_words = [line.split()[0] for line in written.splitlines()]
    assert first_words == ["x" * 79, "1.92", "scheduling-policy=corun"]


@pytest.mark.parametrize("draw", [first_tokens, loads, memory, parts, servers, idle_servers])
def test_no_text_lies_over_another(draw: Callable[[Path], None], tmp_path: Path, saved: list[Figure]) -> None:
    draw(tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 10_000
    (figure,) = saved
    texts = drawn_texts(figure)
    written = " ".join(one.get_text() for one in texts)
    assert TITLE[:20] in written and FOOT[:20] in written
    assert len(texts) > 8
    boxes = [(one, one.get_window_extent()) for one in texts]
    for one, box in boxes:
        assert float(one.get_fontsize()) >= 8, one
        page = figure.bbox
        assert page.x0 <= box.x0 and box.x1 <= page.x1, (one, box)
        assert page.y0 <= box.y0 and box.y1 <= page.y1, (one, box)
    for (one, box), (other, other_box) in itertools.combinations(boxes, 2):
        width = min(box.x1, other_box.x1) - max(box.x0, other_box.x0)
        height = min(box.y1, other_box.y1) - max(box.y0, other_box.y0)
        assert width <= 1 or height <= 1, (one, other)

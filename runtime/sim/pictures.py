"""Pictures of simulated runs. Loads matplotlib when it draws.

The title says the result, axes have units, each line is labelled at its end, and the foot says what
was simulated. Texts do not overlap.
"""

import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

# Eight colours that most people can distinguish. Source: Okabe and Ito, Color Universal Design
# (2008).
_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7a6a00", "#000000")
_GREY = "0.35"
_LEAST_S = 1e-4  # on a logarithmic axis
_POINTS = 9  # of all text but titles
_LINE_GAP = 1.25  # between names, in heights of text
_TITLE_CHARACTERS, _FOOT_CHARACTERS = 84, 130
_WIDTH, _HEIGHT = 9.6, 5.6  # in inches, at least
_LEFT, _AXES_WIDTH, _GAP = 0.85, 6.3, 0.1

Seconds = NDArray[np.float64]


SHARES = np.linspace(0.0, 100.0, 1001)  # percent of the requests


@dataclass(frozen=True, slots=True)
class FirstTokenCurve:
    """First tokens of one variant, over seeds."""

    times_s: Seconds  # percentiles at ``SHARES``
    at_percentile_s: float  # the marked percentile


@dataclass(frozen=True, slots=True)
class LoadPoint:
    """Results of several seeds at one load."""

    rate_rps: float
    median_s: float
    low_s: float
    high_s: float


@dataclass(frozen=True, slots=True)
class MemoryOverTime:
    """Bytes by kind; one element per moment in each."""

    time_s: Sequence[float]
    num_bytes: Mapping[str, Sequence[float]]


@dataclass(frozen=True, slots=True)
class LoadsOverTime:
    """Open requests by server; one element per moment in each."""

    time_s: Sequence[float]
    num_requests: Sequence[Sequence[int]]


def draw_first_tokens(
    curves: Mapping[str, FirstTokenCurve],
    percentile: float,
    slo_s: float | None,
    title: str,
    foot: str,
    path: Path,
) -> None:
    """Shares of requests by their first tokens' times; one line for each name."""
    page = _Page(title, foot, "seconds to the first token", "share of requests, %")
    page.axes.set_xscale("log")
    for (name, curve), color in zip(curves.items(), _COLORS, strict=False):
        times_s, mark_s = np.maximum(curve.times_s, _LEAST_S), curve.at_percentile_s
        page.axes.plot(times_s, SHARES, color=color, linewidth=1.8)
        page.axes.plot([max(mark_s, _LEAST_S)], [percentile], color=color, marker="o", markersize=5)
        page.name_line(percentile, f"{name}: {percentile:g} % in {mark_s:.3g} s", color)
    page.axes.axhline(percentile, color=_GREY, linewidth=0.8, linestyle=":")
    if slo_s is not None:
        page.mark_x(slo_s, f"SLO {slo_s:g} s")
    page.axes.set_ylim(0.0, 101.0)
    page.save(path)


def draw_load_curve(
    points: Mapping[str, Sequence[LoadPoint]],
    percentile: float,
    slo_s: float | None,
    title: str,
    foot: str,
    path: Path,
) -> None:
    """A percentile of first tokens over the load; bars span the seeds."""
    page = _Page(title, foot, "requests per second", f"P{percentile:g} of first tokens, seconds")
    page.axes.set_yscale("log")
    for name, color in zip(points, _COLORS, strict=False):
        curve = points[name]
        median = [one.median_s for one in curve]
        spread = [[one.median_s - one.low_s for one in curve], [one.high_s - one.median_s for one in curve]]
        page.axes.errorbar(
            [one.rate_rps for one in curve],
            median,
            yerr=spread,
            color=color,
            marker="o",
            markersize=4,
            linewidth=1.8,
            elinewidth=1.0,
            capsize=2,
        )
        page.name_line(median[-1], name, color)
    if slo_s is not None:
        page.axes.axhline(slo_s, color=_GREY, linewidth=1.0, linestyle="--")
        page.name_line(slo_s, f"SLO {slo_s:g} s", _GREY)
    page.save(path)


def draw_memory(memory: MemoryOverTime, title: str, foot: str, path: Path) -> None:
    """The device's memory by kind, stacked."""
    page = _Page(title, foot, "seconds from the first arrival", "GiB on the device")
    kinds = list(memory.num_bytes)
    stack = np.array([memory.num_bytes[kind] for kind in kinds], dtype=np.float64) / 2**30
    colors = [color for _, color in zip(kinds, _COLORS, strict=False)]
    page.axes.stackplot(memory.time_s, stack, colors=colors, alpha=0.85, linewidth=0)
    ends = np.cumsum(stack[:, -1])
    for kind, end, height, color in zip(kinds, ends, stack[:, -1], colors, strict=True):
        page.name_line(float(end - height / 2), in_words(kind), color)
    page.axes.set_ylim(0.0, float(stack.sum(axis=0).max()) * 1.02)
    page.axes.margins(x=0.0)
    page.save(path)


def draw_parts(parts_s: Mapping[str, Mapping[str, float]], title: str, foot: str, path: Path) -> None:
    """Mean parts of the time to first tokens: a bar per rank, a colour per part."""
    page = _Page(title, foot, "rank of the adapter", "mean seconds to the first token")
    names = sorted({part for of_one in parts_s.values() for part in of_one})
    base = np.zeros(len(parts_s))
    last = 0.0
    for part, color in zip(names, _COLORS, strict=False):
        heights = np.array([of_one.get(part, 0.0) for of_one in parts_s.values()])
        page.axes.bar(range(len(parts_s)), heights, bottom=base, color=color, width=0.7)
        base += heights
        last = float(base[-1] - heights[-1] / 2)
        page.name_line(last, in_words(part), color)
    page.axes.set_xticks(range(len(parts_s)), list(parts_s))
    page.save(path)


def draw_server_loads(loads: LoadsOverTime, title: str, foot: str, path: Path) -> None:
    """Open requests of all servers over time; the busiest, the idlest and the mean have names."""
    page = _Page(title, foot, "seconds from the first arrival", "open requests on a server")
    values = np.array(loads.num_requests, dtype=np.float64)
    means = values.mean(axis=1)
    for row in values:
        page.axes.plot(loads.time_s, row, color="0.75", linewidth=0.7)
    shown = {
        f"server {int(means.argmax())}, the busiest": values[means.argmax()],
        "mean of all servers": values.mean(axis=0),
        f"server {int(means.argmin())}, the least busy": values[means.argmin()],
    }
    for (name, row), color in zip(shown.items(), _COLORS, strict=False):
        page.axes.plot(loads.time_s, row, color=color, linewidth=1.8)
        page.name_line(float(row[-1]), f"{name}: {row.mean():.3g}", color)
    page.axes.set_ylim(0.0, max(1.0, float(values.max())) * 1.02)
    page.axes.margins(x=0.0)
    page.save(path)


def in_words(name: str) -> str:
    """``running_kv`` as words."""
    return name.replace("_", " ").replace("kv", "KV")


def _wrapped(text: str, width: int) -> str:
    """Wrap ``text``; no line begins with a number's unit or within a name."""
    kept = re.sub(r"(?<=\d) ", "\N{NO-BREAK SPACE}", text)
    lines = textwrap.wrap(kept, width, break_on_hyphens=False)
    return "\n".join(lines).replace("\N{NO-BREAK SPACE}", " ")


class _Page:
    """A picture with one pair of axes, room for names at its right, and a foot."""

    def __init__(self, title: str, foot: str, x_name: str, y_name: str) -> None:
        from matplotlib.figure import Figure

        self.figure: Any = Figure(figsize=(_WIDTH, _HEIGHT), dpi=110)
        self.axes: Any = self.figure.add_axes((0.085, 0.19, 0.655, 0.66))
        self._names: list[tuple[float, str, str]] = []
        lines = _wrapped(title, _TITLE_CHARACTERS)
        self.figure.text(0.02, 0.975, lines, fontsize=12, va="top", weight="bold")
        lines = _wrapped(foot, _FOOT_CHARACTERS)
        self.figure.text(0.02, 0.02, lines, fontsize=8, va="bottom", color=_GREY)
        self.axes.set_xlabel(x_name, fontsize=_POINTS + 1)
        self.axes.set_ylabel(y_name, fontsize=_POINTS + 1)
        self.axes.tick_params(labelsize=_POINTS)
        self.axes.grid(visible=True, alpha=0.25)
        self.axes.spines[["top", "right"]].set_visible(False)

    def name_line(self, y: float, text: str, color: str) -> None:
        """Write ``text`` at the right of the axes, as near to ``y`` as other names permit."""
        self._names.append((y, text, color))

    def mark_x(self, x: float, text: str) -> None:
        """A vertical line with its name above the axes."""
        self.axes.axvline(x, color=_GREY, linewidth=1.0, linestyle="--")
        self.axes.annotate(
            text,
            (x, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(0, 3),
            textcoords="offset points",
            ha="center",
            fontsize=_POINTS,
            color=_GREY,
        )

    def save(self, path: Path) -> None:
        """Place the names and write a PNG. Raises ``OSError``."""
        from matplotlib.ticker import LogLocator

        for axis in (self.axes.xaxis, self.axes.yaxis):
            if axis.get_scale() == "log":
                axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
                axis.set_major_formatter("{x:g}")
                axis.set_minor_formatter("")
        self._make_room()
        self._place_names()
        self.figure.savefig(path, format="png")

    def _make_room(self) -> None:
        """Widen the page until the longest name has room at its right."""
        from matplotlib.backends.backend_agg import FigureCanvasAgg

        canvas: Any = FigureCanvasAgg(self.figure)
        renderer = canvas.get_renderer()
        longest = 0.0
        for _, text, _ in self._names:
            written = self.figure.text(0, 0, text, fontsize=_POINTS)
            longest = max(longest, written.get_window_extent(renderer).width / self.figure.dpi)
            written.remove()
        width = max(_WIDTH, _LEFT + _AXES_WIDTH + 2 * _GAP + longest)
        self.figure.set_figwidth(width)
        right = width - longest - 2 * _GAP
        self.axes.set_position((_LEFT / width, 0.19, (right - _LEFT) / width, 0.66))

    def _place_names(self) -> None:
        """Push names apart upwards, and all of them down if they leave the axes."""
        box = self.axes.get_window_extent()
        gap = _POINTS * _LINE_GAP * self.figure.dpi / 72 / box.height  # in shares of the axes
        wanted = []
        for y, text, color in self._names:
            pixel = self.axes.transData.transform((self.axes.get_xlim()[0], y))[1]
            wanted.append(((pixel - box.y0) / box.height, text, color))
        wanted.sort(key=lambda one: one[0])
        places: list[float] = []
        for at, _, _ in wanted:
            places.append(max([at, *(place + gap for place in places[-1:])]))
        over = max(0.0, places[-1] - 1.0) if places else 0.0
        for index in range(len(places) - 1, -1, -1):
            top = places[index + 1] - gap if index + 1 < len(places) else places[index] - over
            places[index] = min(places[index], top)
        for (_, text, color), place in zip(wanted, places, strict=True):
            self.axes.annotate(
                text,
                (1.0, place),
                xycoords="axes fraction",
                xytext=(72 * _GAP, 0),
                textcoords="offset points",
                va="center",
                fontsize=_POINTS,
                color=color,
                annotation_clip=False,
            )

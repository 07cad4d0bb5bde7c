"""Draws the curves behind the budgets. Loads matplotlib, which only this needs, when it draws."""

from pathlib import Path
from typing import Any

from .curve import Curve
from .profile import FitRecord, Profile, ProfileError

_NUM_COLUMNS = 3
_GREY = "0.35"
_BASE = {"color": "black", "linewidth": 2.0}


def check_matplotlib() -> None:
    """Raise ``ProfileError`` if pictures cannot be drawn here."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ProfileError(
            "a picture needs matplotlib, which is not installed: pip install 'corun[profile]'"
        ) from error


def draw_profile(profile: Profile, path: Path) -> None:
    """Write a PNG: by input group the base products against the deltas, then the rest.

    Raises ``ProfileError`` without matplotlib, or if the file cannot be written.
    """
    check_matplotlib()
    from matplotlib.figure import Figure

    num_panels = len(profile.model.groups) + 6
    num_rows = -(-num_panels // _NUM_COLUMNS)
    figure = Figure(figsize=(5.0 * _NUM_COLUMNS, 3.9 * num_rows), layout="constrained")
    panels = figure.subplots(num_rows, _NUM_COLUMNS, squeeze=False).flat
    for index in range(len(profile.model.groups)):
        _draw_group(next(panels), profile, index)
    _draw_backends(next(panels), profile)
    _draw_steps(next(panels), profile)
    _draw_prediction(next(panels), profile.step_fit, "Whole steps of the base model")
    _draw_decode_fit(next(panels), profile.decode_fit)
    _draw_prediction(next(panels), profile.prefill_fit, "Adapters on the device, prefill")
    _draw_link(next(panels), profile)
    for unused in panels:
        unused.set_axis_off()
    machine = profile.subject.machine
    figure.suptitle(f"corun profile: {machine.device}, {machine.cpu_model}, {profile.created_at}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=110, format="png")
    except OSError as error:
        raise ProfileError(f"{path} cannot be written: {error.strerror or error}") from error


def _draw_group(axes: Any, profile: Profile, index: int) -> None:
    """Draw deltas and base products: where a delta's curve is lower, one core hides it."""
    from matplotlib import colormaps

    group = profile.model.groups[index]
    shades = colormaps["viridis"]
    num_targets = profile.deltas[index].rank_sum // profile.reference_rank
    for place, budget in enumerate(profile.budgets):
        color = shades(0.9 * place / max(1, len(profile.budgets) - 1))
        ranks, job = budget.rank * num_targets, profile.model.job
        curve = Curve(group.base_s.x, tuple(job.part_s(ranks, group.width, int(n)) for n in group.base_s.x))
        label = f"delta, rank {budget.rank}: {budget.tokens_per_worker} tokens per core"
        _line(axes, curve, 1e-6, color=color, label=label)
    _line(axes, group.base_s, 1e-6, label="base products on the device", **_BASE)
    _finish(axes, f"Input group of {group.name}, one layer", "tokens", "microseconds")
    axes.legend(fontsize=7)


def _draw_backends(axes: Any, profile: Profile) -> None:
    deltas = profile.deltas[0]
    for name, curve in deltas.curves:
        _line(axes, curve, 1e-6, marker="o", markersize=3, label=name)
    title = f"Back ends of a worker, {deltas.group}, rank {profile.reference_rank}"
    _finish(axes, title, "tokens", "microseconds")
    axes.legend(fontsize=7)


def _draw_steps(axes: Any, profile: Profile) -> None:
    _line(axes, profile.model.step_s, 1e-3, marker="o", markersize=3, label="prefill, one row")
    decode_s = profile.model.decode_step_s
    assert decode_s is not None, "it is measured"
    _line(axes, decode_s, 1e-3, marker="s", markersize=3, label="decode rows")
    _finish(axes, "Base model, all layers, without attention", "tokens", "milliseconds")
    axes.legend(fontsize=7)


def _draw_decode_fit(axes: Any, record: FitRecord) -> None:
    """As figure 11 of Toppings: time against bytes read."""
    num_bytes = [point[0] for point in record.points]
    axes.plot([x / 2**20 for x in num_bytes], [y * 1e3 for y in record.y], "o", label="measured")
    ends = [0.0, max(num_bytes)]
    fitted = [record.fit.plane.at([x]) * 1e3 for x in ends]
    axes.plot([x / 2**20 for x in ends], fitted, color="black", linewidth=1, label=_fit(record))
    axes.set_title("Adapters on the device, decode", fontsize=10)
    axes.set(xlabel="MiB of the batch's adapters", ylabel="milliseconds, all layers")
    _finish_fit(axes)


def _draw_prediction(axes: Any, record: FitRecord, title: str) -> None:
    """Draw predicted against measured times, as a plane of several terms has no line."""
    predicted_ms = [record.fit.plane.at(point) * 1e3 for point in record.points]
    axes.plot(predicted_ms, [y * 1e3 for y in record.y], "o", label="measured")
    end = max(predicted_ms)
    axes.plot([0.0, end], [0.0, end], color="black", linewidth=1, label=_fit(record))
    axes.set_title(title, fontsize=10)
    axes.set(xlabel="predicted milliseconds", ylabel="milliseconds, all layers")
    _finish_fit(axes)


def _finish_fit(axes: Any) -> None:
    axes.set_ylim(bottom=0)
    axes.grid(visible=True, alpha=0.3)
    axes.legend(fontsize=7)


def _fit(record: FitRecord) -> str:
    return f"fitted, R² {record.fit.r_squared:.3f} on {record.fit.num_held_out} held out"


def _draw_link(axes: Any, profile: Profile) -> None:
    for concurrency in sorted({point.concurrency for point in profile.link_points}):
        points = [p for p in profile.link_points if p.concurrency == concurrency]
        axes.plot(
            [p.chunk_bytes / 2**10 for p in points],
            [p.bytes_per_s / 2**30 for p in points],
            marker="o",
            markersize=3,
            label=f"{concurrency} at a time",
        )
    axes.axvline(profile.min_group_bytes / 2**10, color=_GREY, linestyle="--", linewidth=1)
    axes.set_title("Copies to the device; dashed: least layer group", fontsize=10)
    axes.set(xlabel="KiB of a copy", ylabel="GiB/s together", xscale="log")
    _number(axes.xaxis)
    axes.set_ylim(bottom=0)
    axes.grid(visible=True, alpha=0.3)
    axes.legend(fontsize=7)


def _line(axes: Any, curve: Curve, unit_s: float, **style: Any) -> None:
    axes.plot(curve.x, [value / unit_s for value in curve.y], **style)


def _finish(axes: Any, title: str, x_label: str, y_label: str) -> None:
    axes.set_title(title, fontsize=10)
    axes.set(xlabel=x_label, ylabel=y_label, xscale="log", yscale="log")
    for axis in (axes.xaxis, axes.yaxis):
        _number(axis)
    axes.grid(visible=True, alpha=0.3)


def _number(axis: Any) -> None:
    """Label a logarithmic axis with plain numbers instead of powers of ten."""
    from matplotlib.ticker import LogLocator, NullLocator

    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter("{x:g}")

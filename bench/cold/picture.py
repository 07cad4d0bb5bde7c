"""Bars per cell and strategy."""

from collections.abc import Sequence
from pathlib import Path

from cold.cells import COLD, CellResult

_COLORS = {
    "blocking": "#b0b0b0",
    "async_load": "#d5b37a",
    "pipelined": "#7aa6d5",
    "assisted": "#5aa469",
    "planner": "#303030",
}


def draw(results: Sequence[CellResult], path: Path) -> None:
    """First and second token of each cold strategy, as multiples of cached."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    width = max(8.0, 1.5 * len(results))
    figure, rows = plt.subplots(2, 1, figsize=(width, 8), sharex=True, layout="constrained")
    for axes, moment in zip(rows, ("first_token", "second_token"), strict=True):
        for index, name in enumerate(COLD):
            ratios = [result.ratios[moment][name] for result in results]
            places = [x + (index - (len(COLD) - 1) / 2) * 0.16 for x in range(len(results))]
            low = [max(0.0, r.median - r.low) for r in ratios]
            high = [max(0.0, r.high - r.median) for r in ratios]
            axes.bar(
                places,
                [r.median for r in ratios],
                0.15,
                yerr=[low, high],
                label=name,
                color=_COLORS[name],
                error_kw={"linewidth": 1},
            )
        axes.axhline(1.0, color="black", linewidth=1)
        axes.axhline(1.1, color="black", linewidth=0.7, linestyle=":")
        axes.set_ylabel(f"time to {moment.replace('_', ' ')}, cached = 1")
        axes.grid(visible=True, axis="y", alpha=0.3)
    handles, labels = rows[0].get_legend_handles_labels()
    figure.legend(handles, labels, ncols=len(COLD), loc="outside upper center")
    rows[0].set_title("Cold starts by strategy (median of rounds, 90 % interval)")
    rows[1].set_xticks(range(len(results)), [_label(result) for result in results], fontsize=8)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _label(result: CellResult) -> str:
    cell = result.cell
    return (
        f"{cell.prompt_tokens} tokens\nr{cell.rank} {cell.targets}\nload {cell.load_ratio:g}\n"
        f"delta {result.slowness.ratio:.2g}"
    )

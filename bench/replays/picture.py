"""Points per setting and policy, over the baseline."""

from pathlib import Path

from replays.cells import BASELINE, POLICIES
from replays.verdicts import METRICS, Results, ratio

_COLORS = {
    "fcfs": "#7f7f7f",
    "sjf": "#d5b37a",
    "corun": "#c0392b",
    "chameleon": "#2e7d4f",
    "chameleon-paper": "#8fc7a3",
    "output-only": "#7aa6d5",
}

_TICKS = (1.0, 1.2, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0)


def draw(results: Results, path: Path, title: str) -> None:
    """Each metric's ratio to the baseline on the same arrivals; below 1 is better."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import LogLocator, NullLocator

    settings = [setting for setting, policy in results if policy == BASELINE]
    policies = [
        policy
        for policy in POLICIES
        if policy != BASELINE and any((setting, policy) in results for setting in settings)
    ]
    figure, rows = plt.subplots(
        len(METRICS), 1, figsize=(max(8.0, 1.3 * len(settings)), 12), sharex=True, layout="constrained"
    )
    for axes, metric in zip(rows, METRICS, strict=True):
        for index, policy in enumerate(policies):
            shift = (index - (len(policies) - 1) / 2) * 0.8 / max(1, len(policies))
            for x, setting in enumerate(settings):
                one = ratio(results, setting, policy, BASELINE, metric)
                if one is None:
                    continue
                axes.errorbar(
                    x + shift,
                    one.median,
                    yerr=[[max(0.0, one.median - one.low)], [max(0.0, one.high - one.median)]],
                    fmt="o",
                    markersize=5,
                    color=_COLORS[policy],
                    elinewidth=1.2,
                    label=policy if x == 0 else None,
                )
        axes.axhline(1.0, color="black", linewidth=1)
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=_TICKS))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter("{x:.2g}")
        axes.tick_params(axis="y", labelsize=8)
        axes.set_ylabel(f"{metric}, {BASELINE} = 1")
        axes.grid(visible=True, axis="y", alpha=0.3)
    handles, labels = rows[0].get_legend_handles_labels()
    figure.legend(handles, labels, ncols=max(1, len(labels)), loc="outside upper center")
    rows[0].set_title(title, fontsize=10)
    rows[-1].set_xticks(range(len(settings)), [setting.name for setting in settings], fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)

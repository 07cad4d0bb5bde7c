"""All policies in one table."""

import statistics
from collections.abc import Iterable, Sequence

from corun.runtime.sim.figures import Figures

from replays.settings import Setting
from replays.verdicts import METRICS, Results, median_of

_HEAD = (
    "setting",
    "policy",
    *METRICS,
    "E2E",
    "TPOT ms",
    "preempted",
    "squashed",
    "refused",
    "K",
    "quotas",
    "evicted",
    "GB in",
    "hits",
    "of host",
)


def table(results: Results) -> str:
    """Medians over seeds; times in seconds. Queues and quotas are the first seed's, at its end.

    Adapters evicted, what came over the link, and prompt tokens found in the KV of others.
    """
    rows: list[Sequence[str]] = [_HEAD]
    rows += [_row(setting, policy, figures) for (setting, policy), figures in results.items()]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(_line(row, widths) for row in rows)


def _row(setting: Setting, policy: str, figures: Sequence[Figures]) -> Sequence[str]:
    num_requests = sum(one.num_requests for one in figures)
    counts = figures[0].policy_counts
    quotas = [round(value) for name, value in counts.items() if name.endswith("_quota_tokens")]
    return (
        setting.name,
        policy,
        *(f"{median_of(figures, metric):.2f}" for metric in METRICS),
        f"{statistics.median(one.e2e_mean_s for one in figures):.1f}",
        f"{1e3 * statistics.median(one.tpot_mean_s for one in figures):.0f}",
        f"{sum(one.num_preempted for one in figures) / num_requests:.2%}",
        f"{sum(one.num_squashes for one in figures) / num_requests:.2%}",
        str(sum(one.num_refused for one in figures)),
        str(len(quotas)) if quotas else "-",
        "/".join(map(str, quotas)) or "-",
        f"{statistics.median(one.num_evictions for one in figures):.0f}",
        f"{statistics.median(one.link_bytes for one in figures) / 1e9:.1f}",
        f"{statistics.median(one.hit_share for one in figures):.1%}",
        f"{statistics.median(one.host_hit_share for one in figures):.1%}",
    )


def _line(row: Iterable[str], widths: Sequence[int]) -> str:
    cells = [
        text.ljust(width) if index < 2 else text.rjust(width)
        for index, (text, width) in enumerate(zip(row, widths, strict=True))
    ]
    return "  ".join(cells).rstrip()

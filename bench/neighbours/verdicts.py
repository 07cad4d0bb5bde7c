"""Compares stored cells with the bounds; None = other programs disturbed the cell."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from paired import MAX_CONTROL_SPREAD, Ratio, ratio_of

Cells = Mapping[str, Any]
Verdict = tuple[str, bool | None]

MIN_OVER_AGAINST = {1: 1.20, 8: 1.05, 16: 1.07}  # tokens/s, by requests in flight
MAX_OVER_READ, MAX_OVER_FAST_READ, FAST_READ_GB_PER_S = 1.15, 1.35, 45.0
MIN_OF_BEST_THREADS = 0.9
MIN_OF_SHARE = 0.6
MAX_GAP_OVER_SHARE = 4.0
FULL_SPEED = 0.95
MAX_QUIET_AGAIN_S = 60.0
MAX_OVER_STARTED = 1.1
MIN_BOUNDED_RATE = 0.97
QUOTA = "quota"


def cell_name(part: str, kind: str, *rest: object) -> str:
    """Of a cell in the file."""
    return "/".join((part, kind, *map(str, rest)))


def share_of(per_core: int) -> float:
    """Of a core's time, beside so many processes that compute without end."""
    return 1 / (1 + per_core)


def rate_of(row: Mapping[str, Sequence[float]]) -> float:
    """The median of the rounds."""
    return statistics.median(row["tokens_per_s"])


def gap_of(row: Mapping[str, Sequence[float]]) -> float:
    """The median of the rounds' 95th percentiles, in milliseconds."""
    return statistics.median(row["gap_p95_ms"])


def over(value: float, other: float) -> float:
    """Their ratio; infinite over nothing."""
    return value / other if other else float("inf")


def paired(cell: Cells, name: str, other: str) -> Ratio:
    """Of the rates of two servers, round by round."""
    rates = zip(cell[name]["tokens_per_s"], cell[other]["tokens_per_s"], strict=True)
    return ratio_of([over(a, b) for a, b in rates])


def speed_verdicts(label: str, clients: int, cell: Cells) -> Iterator[Verdict]:
    """This tree over another one, where this one twice came out the same."""
    ratio, control = paired(cell, "auto", "against"), paired(cell, "auto", "auto again")
    least = MIN_OVER_AGAINST[clients]
    is_met = ratio.median >= least if control.spread <= MAX_CONTROL_SPREAD else None
    yield f"{label}: {_said(ratio)} of the other tree's, >= {least}", is_met


def reading_verdicts(label: str, cell: Cells) -> Iterator[Verdict]:
    """A step over a plain read of the weights."""
    rows = cell["read_gap_read"]
    read_gb_per_s = statistics.median(value for row in rows for value in (row[0], row[2]))
    ratio = ratio_of([gap_ms * (a + b) / 2 * 1e6 / cell["weight_bytes"] for a, gap_ms, b in rows])
    most = MAX_OVER_READ if read_gb_per_s < FAST_READ_GB_PER_S else MAX_OVER_FAST_READ
    yield (
        f"{label}: a step is {_said(ratio)} of reading the weights at {read_gb_per_s:.1f} GB/s, <= {most}",
        ratio.median <= most,
    )


def threads_verdicts(label: str, cell: Cells) -> Iterator[Verdict]:
    """The threads that were chosen against the better of those that are given."""
    fixed = {name: rate_of(row) for name, row in cell.items() if name.startswith("threads ")}
    best = max(fixed, key=lambda name: fixed[name])
    ratio = over(rate_of(cell["auto"]), fixed[best])
    yield f"{label}: {ratio:.2f} of {best}, >= {MIN_OF_BEST_THREADS}", ratio >= MIN_OF_BEST_THREADS


def share_verdicts(label: str, per_core: int, cell: Cells, quiet: Cells) -> Iterator[Verdict]:
    """Rates and gaps beside competitors against those of a quiet machine."""
    share = share_of(per_core)
    rate = over(rate_of(cell["auto"]), rate_of(quiet["auto"])) / share
    yield f"{label}: {rate:.2f} x share x quiet rate, >= {MIN_OF_SHARE}", rate >= MIN_OF_SHARE
    gap = over(gap_of(cell["auto"]), gap_of(quiet["auto"])) * share
    yield (
        f"{label}: P95 gap {gap:.2f} x quiet P95 gap / share, <= {MAX_GAP_OVER_SHARE:g}",
        gap <= MAX_GAP_OVER_SHARE,
    )


def peer_verdicts(label: str, cell: Cells) -> Iterator[Verdict]:
    """At least as fast as another project's server."""
    ratio = over(rate_of(cell["auto"]), rate_of(cell["peer"]))
    yield f"{label}: {ratio:.2f} of the peer's rate, >= 1", ratio >= 1


def again_verdicts(label: str, cell: Cells) -> Iterator[Verdict]:
    """When the speed from before competitors is reached again."""
    least = FULL_SPEED * statistics.median(cell["before"])
    when_s = next((when_s for when_s, rate in cell["after"] if rate >= least), None)
    said = "is not reached again" if when_s is None else f"is reached again after {when_s:.0f} s"
    yield (
        f"{label}: {FULL_SPEED:g} of full speed {said}, <= {MAX_QUIET_AGAIN_S:g} s",
        when_s is not None and when_s <= MAX_QUIET_AGAIN_S,
    )


def start_verdicts(label: str, cells: Sequence[Cells]) -> Iterator[Verdict]:
    """Servers that started under load, once all is quiet, against one of a quiet start."""
    for clients in ("1", "8"):
        ratios = [paired(cell[clients], "quiet", "started under load").median for cell in cells]
        num_held = sum(ratio <= MAX_OVER_STARTED for ratio in ratios)
        yield (
            f"{label}, {clients} requests: the quiet start is at most {max(ratios):.2f} x as fast, "
            f"<= {MAX_OVER_STARTED} in {num_held} of {len(ratios)}",
            num_held == len(ratios),
        )


def gap_verdicts(label: str, cell: Cells) -> Iterator[Verdict]:
    """Gaps beside long prompts against their bound, and what the bound costs."""
    gap_ms, bounds_ms = gap_of(cell["auto"]), cell["auto"]["bound_ms"]
    if bounds_ms:
        bound_ms = statistics.median(bounds_ms)
        yield f"{label}: P95 gap {gap_ms:.0f} ms, <= {bound_ms:.0f} ms", gap_ms <= bound_ms
    else:
        yield f"{label}: P95 gap {gap_ms:.0f} ms, no step had a bound", None
    ratio = paired(cell, "auto", "unbounded")
    yield (
        f"{label}: {_said(ratio)} of the tokens/s without a bound, >= {MIN_BOUNDED_RATE}",
        ratio.median >= MIN_BOUNDED_RATE,
    )


def verdicts(cells: Cells) -> dict[str, bool | None]:
    """Of everything that has been measured."""
    found: dict[str, bool | None] = {}
    for name, cell in cells.items():
        is_disturbed = bool(cell["disturbed"])
        for said, is_met in _verdicts_of(name, cell, cells):
            found[said] = None if is_disturbed else is_met
    starts: dict[str, list[Cells]] = {}
    for name, cell in cells.items():
        if name.startswith("start/"):
            starts.setdefault(name.rpartition("/")[0], []).append(cell)
    for label, group in starts.items():
        is_disturbed = any(cell["disturbed"] for cell in group)
        for said, is_met in start_verdicts(label, group):
            found[said] = None if is_disturbed else is_met
    return found


def _verdicts_of(name: str, cell: Cells, cells: Cells) -> Iterator[Verdict]:
    part, kind, *rest = name.split("/")
    if part == "speed" and "against" in cell:
        yield from speed_verdicts(name, int(rest[0]), cell)
    elif part == "reading":
        yield from reading_verdicts(name, cell)
    elif part == "busy":
        beside, clients = rest
        if "peer" in cell:
            yield from peer_verdicts(name, cell)
        if beside == "0":
            return
        yield from threads_verdicts(name, cell)
        quiet = cells.get(cell_name("busy", kind, 0, clients))
        if beside != QUOTA and quiet is not None:
            yield from share_verdicts(name, int(beside), cell, quiet)
    elif part == "again":
        yield from again_verdicts(name, cell)
    elif part == "gaps":
        yield from gap_verdicts(name, cell)


def _said(ratio: Ratio) -> str:
    return f"{ratio.median:.3f} ({ratio.low:.3f} to {ratio.high:.3f})"

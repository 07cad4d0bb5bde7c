"""Derives token budgets and layer groups from measured curves. Pure."""

from collections.abc import Sequence

from ..cpu_workers.teams import JobModel
from .curve import Curve
from .models import LinkModel, MachineModel

_GOOD_RATE = 0.9  # of a core's best tokens per second
_LATENCY_SHARE = 0.1  # of a layer group's time on the link


def tokens_per_worker(model: MachineModel, rank_sums: Sequence[int], max_tokens: int) -> int:
    """The tokens per core for adapters with these ranks per input group, in whole tiles.

    The most tokens for which one core computes the deltas while the device computes the base
    products: ceil(L / c) cores then hide the deltas of any L behind its base products. Where no
    core keeps up, the fewest tokens at which a core is near its best rate. At most ``max_tokens``,
    those of a step. A figure for reports: teams are chosen by ``JobModel`` itself.

    Source: Toppings, section 4.2, which sets c by profiling without giving the rule.
    """
    groups = [pair for pair in zip(model.groups, rank_sums, strict=True) if pair[1]]
    kept_up = 0
    for num_tokens in _ladder(max_tokens):
        if not all(
            model.job.part_s(ranks, group.width, num_tokens) <= group.base_s.at(num_tokens)
            for group, ranks in groups
        ):
            break
        kept_up = num_tokens
    return kept_up or max(_knee(model.job, ranks, group.width, max_tokens) for group, ranks in groups)


def min_group_bytes(link: LinkModel) -> int:
    """Bytes of a layer group above which the link's latency is a small share of its time."""
    return max(1, round(link.latency_s * link.bytes_per_s * (1 / _LATENCY_SHARE - 1)))


def crossovers(names: Sequence[str], curves: Sequence[Curve]) -> tuple[tuple[int, str], ...]:
    """The fastest curve by number of tokens: (first tokens, name), ascending.

    Up to the last point that all curves have: beyond its points a curve is only a guess.
    """
    result: list[tuple[int, str]] = []
    for num_tokens in _ladder(int(min(curve.x[-1] for curve in curves))):
        best = min(range(len(names)), key=lambda index: curves[index].at(num_tokens))
        if not result or result[-1][1] != names[best]:
            result.append((num_tokens, names[best]))
    return tuple(result)


def _knee(job: JobModel, ranks: int, width: float, max_tokens: int) -> int:
    rates = {n: n / job.part_s(ranks, width, n) for n in _ladder(max_tokens)}
    best = max(rates.values())
    return min(tokens for tokens, rate in rates.items() if rate >= _GOOD_RATE * best)


def _ladder(max_tokens: int) -> Sequence[int]:
    """Token counts to try: every one at first, then in steps of an eighth."""
    tokens = [1]
    while tokens[-1] < max_tokens:
        tokens.append(min(max_tokens, tokens[-1] + max(1, tokens[-1] // 8)))
    return tokens

"""Derives token budgets and layer groups from measured curves. Pure."""

from collections.abc import Sequence

from .curve import Curve
from .models import GroupModel, LinkModel

_GOOD_RATE = 0.9  # of a core's best tokens per second
_LATENCY_SHARE = 0.1  # of a layer group's time on the link


def tokens_per_worker(groups: Sequence[GroupModel], rank_sums: Sequence[int], max_tokens: int) -> int:
    """The per-core token budget c for adapters with these ranks per input group.

    The most tokens for which one core computes the deltas while the device computes the base
    products: ceil(L / c) cores then hide the deltas of any L behind its base products. Where no
    core keeps up, the fewest tokens at which a core is near its best rate, as finer slices would
    only add invocations. At most ``max_tokens``, those of a step.

    Source: Toppings, section 4.2, which sets c by profiling without giving the rule.
    """
    kept_up = 0
    for num_tokens in _ladder(max_tokens):
        hidden = all(
            group.delta_s.at(rank_sum, num_tokens) <= group.base_s.at(num_tokens)
            for group, rank_sum in zip(groups, rank_sums, strict=True)
            if rank_sum
        )
        if not hidden:
            break
        kept_up = num_tokens
    return kept_up or max(
        _knee(group, rank_sum, max_tokens)
        for group, rank_sum in zip(groups, rank_sums, strict=True)
        if rank_sum
    )


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


def _knee(group: GroupModel, rank_sum: int, max_tokens: int) -> int:
    rates = {n: n / group.delta_s.at(rank_sum, n) for n in _ladder(max_tokens)}
    best = max(rates.values())
    return min(tokens for tokens, rate in rates.items() if rate >= _GOOD_RATE * best)


def _ladder(max_tokens: int) -> Sequence[int]:
    """Token counts to try: every one at first, then in steps of an eighth."""
    tokens = [1]
    while tokens[-1] < max_tokens:
        tokens.append(min(max_tokens, tokens[-1] + max(1, tokens[-1] // 8)))
    return tokens

"""Bounds of settings, and their verdicts. All simulated."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from corun.runtime.sim.results import percentile_s
from corun.runtime.sim.study import RunOutcome

from routes.settings import Setting

PERCENTILE = 95.0  # of first tokens
TOKEN_SLO_FACTOR = 1.5  # Toppings, section 7.4
_MAX_FILES_OVER_MEAN = 4.0
_MAX_POINTS_BELOW = 0.01  # of requests, of the best router

# By setting, one for each seed.
Outcomes = Mapping[Setting, Sequence[RunOutcome]]


@dataclass(frozen=True, slots=True)
class Verdict:
    """One line of the report."""

    text: str
    figures: str
    is_held: bool


class Bound(Protocol):
    """Something that is to hold."""

    @property
    def settings(self) -> Sequence[Setting]:
        """What must be run for it."""

    def verdicts(self, outcomes: Outcomes) -> Iterator[Verdict]:
        """Judge."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WithinSlo:
    """P95 of first tokens: ``holding`` stay within it, ``failing`` do not, by median over seeds.

    So if B fails at a rate r and A holds k r, A bears at least k times what B bears.
    """

    text: str
    slo_s: float
    holding: Sequence[Setting]
    failing: Sequence[Setting] = ()

    @property
    def settings(self) -> Sequence[Setting]:
        """See ``Bound``."""
        return (*self.failing, *self.holding)

    def verdicts(self, outcomes: Outcomes) -> Iterator[Verdict]:
        """One, with the P95 of each."""
        p95_s = {setting: tail_s(outcomes[setting]) for setting in self.settings}
        is_held = all(p95_s[one] <= self.slo_s for one in self.holding)
        is_held = is_held and all(p95_s[one] > self.slo_s for one in self.failing)
        said = "; ".join(
            f"{setting.name}: {p95_s[setting]:.2f} s "
            f"({'to hold' if setting in self.holding else 'to fail'} {self.slo_s:g} s)"
            for setting in self.settings
        )
        yield Verdict(self.text, said, is_held)


@dataclass(frozen=True, slots=True, kw_only=True)
class TailRatio:
    """P95 of first tokens of ``a`` over that of ``b`` on the same requests; median over seeds."""

    text: str
    a: Setting
    b: Setting
    most: float

    @property
    def settings(self) -> Sequence[Setting]:
        """See ``Bound``."""
        return self.a, self.b

    def verdicts(self, outcomes: Outcomes) -> Iterator[Verdict]:
        pairs = zip(outcomes[self.a], outcomes[self.b], strict=True)
        ratios = [percentile_s(a, PERCENTILE) / percentile_s(b, PERCENTILE) for a, b in pairs]
        median = statistics.median(ratios)
        said = f"{median:.3f} ({min(ratios):.3f} to {max(ratios):.3f}), at most {self.most:g}"
        yield Verdict(self.text, said, median <= self.most)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attainment:
    """Shares of requests with a time per token within 1.5 times the mean without adapters.

    Of ``judged`` at each load within one point of the best, and at the highest the best.
    """

    text: str
    judged: str  # a router
    by_router: Mapping[str, Sequence[Setting]]  # each by load, the lowest first
    without: Setting  # without adapters, at the lowest load

    @property
    def settings(self) -> Sequence[Setting]:
        """See ``Bound``."""
        return (self.without, *(one for of_router in self.by_router.values() for one in of_router))

    def verdicts(self, outcomes: Outcomes) -> Iterator[Verdict]:
        """One for each load."""
        alone_s = statistics.mean(
            one.token_s for outcome in outcomes[self.without] for one in outcome.requests
        )
        slo_s = TOKEN_SLO_FACTOR * alone_s
        for load, settings in enumerate(zip(*self.by_router.values(), strict=True)):
            shares = {
                router: _share_within(outcomes[setting], slo_s)
                for router, setting in zip(self.by_router, settings, strict=True)
            }
            is_highest = load == len(self.by_router[self.judged]) - 1
            slack = 0.0 if is_highest else _MAX_POINTS_BELOW
            said = ", ".join(f"{router} {share:.1%}" for router, share in shares.items())
            yield Verdict(
                f"{self.text}, {settings[0].rate_rps:g} requests/s",
                f"{said} of {slo_s:.4f} s",
                shares[self.judged] >= max(shares.values()) - slack,
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class FewFiles:
    """No server keeps more than four times what each has if there is one copy of each."""

    text: str
    setting: Setting

    @property
    def settings(self) -> Sequence[Setting]:
        """See ``Bound``."""
        return (self.setting,)

    def verdicts(self, outcomes: Outcomes) -> Iterator[Verdict]:
        """One, by the seed with the most."""
        num_adapters = self.setting.workload.adapters.number
        most = _MAX_FILES_OVER_MEAN * num_adapters / self.setting.num_servers
        found = [one.cluster.figures.most_files for one in outcomes[self.setting] if one.cluster]
        yield Verdict(self.text, f"{max(found)} adapters, at most {most:g}", max(found) <= most)


def tail_s(outcomes: Sequence[RunOutcome]) -> float:
    """P95 of first tokens; median over seeds."""
    return statistics.median(percentile_s(one, PERCENTILE) for one in outcomes)


def _share_within(outcomes: Sequence[RunOutcome], slo_s: float) -> float:
    requests = [one for outcome in outcomes for one in outcome.requests]
    return sum(one.token_s <= slo_s for one in requests) / len(requests)

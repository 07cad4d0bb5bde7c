"""The specification of a workload: the form of a workload file, as plain data.

Every field has a default. Contradictions are refused at construction, with the names of the file's
keys.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

from ..errors import ConfigError
from ..near_names import near_names

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

RANKS = (8, 16, 32, 64, 128)
MAX_RPS = 1e6
_MOST_REQUESTS = 10_000_000
_MOST_ADAPTERS = 1_000_000
_MOST_RANK = 1024
_DEFAULT_REQUESTS = 500

_REQUEST_TRACES = ("azure-conv", "azure-code", "mooncake")
_CLIENT_TRACES = ("servegen-m-small", "servegen-m-mid")
_LENGTHS = (*_REQUEST_TRACES, *_CLIENT_TRACES, "fixed")
_ARRIVALS = ("poisson", "gamma", "on-off", "trace")
_POPULARITIES = ("by-rank", "zipf", "in-turn", "gentd26", "maf", "clients")
_RANK_POPULARITIES = ("power", "halving", "shifting")


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthSpec:
    """Tokens of prompts and outputs."""

    source: str = "azure-conv"
    prompt_tokens: int = 512  # of ``fixed``, as the next
    output_tokens: int = 128
    prompt_divisor: int = 1  # for models so small that a CPU serves them
    output_divisor: int = 1

    def __post_init__(self) -> None:
        _check_choice("lengths.source", self.source, _LENGTHS)
        for name in ("prompt_tokens", "output_tokens", "prompt_divisor", "output_divisor"):
            _check_range(f"lengths.{name}", getattr(self, name), 1)
        _check_use("lengths", self, "source", {"fixed": ("prompt_tokens", "output_tokens")})


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrivalSpec:
    """When requests arrive."""

    # ``trace``: the arrivals of the trace of lengths or of adapters, scaled to the rate.
    process: str = "poisson"
    cv: float = 1.0  # of ``gamma``: standard deviation of the gaps over their mean
    on_s: float = 10.0  # of ``on-off``: duration of Poisson arrivals, before a pause of ``off_s``
    off_s: float = 10.0

    def __post_init__(self) -> None:
        _check_choice("arrivals.process", self.process, _ARRIVALS)
        _check_range("arrivals.cv", self.cv, 0.01, 100.0)
        _check_range("arrivals.on_s", self.on_s, 0.001)
        _check_range("arrivals.off_s", self.off_s, 0.0)
        _check_use("arrivals", self, "process", {"gamma": ("cv",), "on-off": ("on_s", "off_s")})


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSpec:
    """The adapters, and their popularity."""

    # ``by-rank``: first a rank is drawn, then one of its adapters. ``zipf``: the k-th adapter with
    # weight k ** -exponent. ``in-turn``: one after the other. ``gentd26``: in the order of that
    # trace. ``maf``: one for each function of Azure's, ``clients``: one for each of ServeGen's.
    # Ranks come in equal numbers.
    popularity: str = "by-rank"
    number: int = 100  # of ``by-rank``, ``zipf`` and ``in-turn``
    ranks: tuple[int, ...] = RANKS
    exponent: float = 0.9  # of ``zipf``
    # ``power``: the k-th smallest rank with weight k ** -rank_exponent. ``halving``: 2 ** -k.
    # ``shifting``: half are of the largest rank at first and, changing linearly, of the smallest
    # at the end.
    rank_popularity: str = "power"
    rank_exponent: float = 1.0
    within_exponent: float = 0.0  # the k-th adapter of a rank with weight k ** -within_exponent

    def __post_init__(self) -> None:
        _check_choice("adapters.popularity", self.popularity, _POPULARITIES)
        _check_choice("adapters.rank_popularity", self.rank_popularity, _RANK_POPULARITIES)
        _check_range("adapters.number", self.number, 1, _MOST_ADAPTERS)
        if not self.ranks or list(self.ranks) != sorted(set(self.ranks)):
            raise ConfigError(f"adapters.ranks is {list(self.ranks)}, must be ascending ranks")
        for rank in self.ranks:
            _check_range("adapters.ranks", rank, 1, _MOST_RANK)
        for name in ("exponent", "rank_exponent", "within_exponent"):
            _check_range(f"adapters.{name}", getattr(self, name), 0.0, 10.0)
        by_rank = ("rank_popularity", "rank_exponent", "within_exponent", "number")
        _check_use(
            "adapters",
            self,
            "popularity",
            {"by-rank": by_rank, "zipf": ("exponent", "number"), "in-turn": ("number",)},
        )
        _check_use("adapters", self, "rank_popularity", {"power": ("rank_exponent",)})
        if self.popularity == "by-rank" and self.number % len(self.ranks):
            raise ConfigError(
                f"adapters.number is {self.number}, must be a multiple of the "
                f"{len(self.ranks)} adapters.ranks"
            )
        if self.rank_popularity == "shifting" and len(self.ranks) < 2:
            raise ConfigError("adapters.rank_popularity is 'shifting', which needs two ranks")


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSpec:
    """Follow-up requests: each continues an earlier one of its adapter and shares its prompt."""

    follow_up_share: float = 0.0  # of requests, as far as there are earlier ones to follow
    min_gap_s: float = 10.0  # after the earlier request
    max_gap_s: float = 300.0

    def __post_init__(self) -> None:
        _check_range("sessions.follow_up_share", self.follow_up_share, 0.0, 1.0)
        _check_range("sessions.min_gap_s", self.min_gap_s, 0.0)
        _check_range("sessions.max_gap_s", self.max_gap_s, self.min_gap_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadSpec:
    """The specification of a whole workload."""

    rps: float | None = None  # None = 1, or the own clock of ``json_lines``
    requests: int | None = None  # None = by ``duration_s``, else 500, or all of ``json_lines``
    duration_s: float | None = None
    seed: int = 1
    json_lines: str | None = None  # a file with one request per line, which decides all but ranks
    lengths: LengthSpec = field(default_factory=LengthSpec)
    arrivals: ArrivalSpec = field(default_factory=ArrivalSpec)
    adapters: AdapterSpec = field(default_factory=AdapterSpec)
    sessions: SessionSpec = field(default_factory=SessionSpec)

    def __post_init__(self) -> None:
        if self.rps is not None:
            _check_range("rps", self.rps, 0.0, MAX_RPS, is_above=True)
        if self.duration_s is not None:
            _check_range("duration_s", self.duration_s, 0.0, is_above=True)
        if self.requests is not None and self.duration_s is not None:
            raise ConfigError("requests and duration_s are both given; give one of them")
        num_requests = self.num_requests if self.json_lines is None else self.requests
        if num_requests is not None:
            if num_requests < 1:
                raise ConfigError(f"a workload of {num_requests} requests holds no request")
            _check_range("requests", num_requests, 1, _MOST_REQUESTS)
        _check_range("seed", self.seed, 0, 2**63)
        if self.json_lines is None:
            self._check_sources()

    @property
    def rate_rps(self) -> float:
        """Drawn requests per second."""
        return 1.0 if self.rps is None else self.rps

    @property
    def num_requests(self) -> int:
        """The number of drawn requests."""
        if self.requests is not None:
            return self.requests
        if self.duration_s is None:
            return _DEFAULT_REQUESTS
        return round(self.rate_rps * self.duration_s)

    @property
    def has_trace_sessions(self) -> bool:
        return self.lengths.source == "mooncake" and self.arrivals.process == "trace"

    def _check_sources(self) -> None:
        """Refuse traces that lack what the specification needs."""
        has_clients = self.adapters.popularity == "clients"
        if has_clients != (self.lengths.source in _CLIENT_TRACES):
            raise ConfigError(
                f"adapters.popularity is {self.adapters.popularity!r} and lengths.source is "
                f"{self.lengths.source!r}: clients have their own lengths ({_CLIENT_TRACES[0]})"
            )
        is_trace = self.arrivals.process == "trace"
        own_clock = has_clients or self.adapters.popularity == "maf"
        if has_clients and not is_trace:
            raise ConfigError("arrivals.process must be 'trace' where adapters are clients")
        if is_trace and not own_clock and self.lengths.source not in _REQUEST_TRACES:
            raise ConfigError(
                f"arrivals.process is 'trace', but lengths.source {self.lengths.source!r} has none"
            )
        if self.has_trace_sessions and (own_clock or self.adapters.popularity == "gentd26"):
            raise ConfigError(
                f"adapters.popularity is {self.adapters.popularity!r}, which does not know the "
                "sessions of mooncake: it must be by-rank or zipf"
            )
        if self.has_trace_sessions and self.sessions.follow_up_share:
            raise ConfigError("sessions.follow_up_share is given, but mooncake has its own sessions")


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a workload is made, and the machine that it is meant for."""

    machine: str
    spec: WorkloadSpec


def _check_choice(name: str, value: str, choices: Iterable[str]) -> None:
    if value not in choices:
        hint = near_names(value, choices) or f", must be one of: {', '.join(choices)}"
        raise ConfigError(f"{name} is {value!r}{hint}")


def _check_use(part: str, spec: "DataclassInstance", choice: str, used: Mapping[str, Sequence[str]]) -> None:
    """Refuse fields that the chosen value does not use; ``used``: fields by chosen value."""
    chosen = getattr(spec, choice)
    usual = {one.name: one.default for one in fields(spec)}
    for name in dict.fromkeys(name for names in used.values() for name in names):
        if name not in used.get(chosen, ()) and getattr(spec, name) != usual[name]:
            users = " or ".join(value for value, names in used.items() if name in names)
            raise ConfigError(
                f"{part}.{name} is {getattr(spec, name)}, which {part}.{choice} {chosen!r} does "
                f"not use ({users} does)"
            )


def _check_range(
    name: str, value: float, least: float, most: float = math.inf, *, is_above: bool = False
) -> None:
    """Refuse a value below ``least`` (or at it, if ``is_above``), above ``most``, or not finite."""
    is_low = value <= least if is_above else value < least
    if is_low or not value <= most or not math.isfinite(value):
        bound = f"{'above' if is_above else 'at least'} {least:g}"
        bound += f" and at most {most:g}" if math.isfinite(most) else ""
        raise ConfigError(f"{name} is {value:g}, must be {bound}")

"""Recipes of workloads with many adapters, each drawn from a trace of real traffic.

The recipe of S1 is Chameleon's (section 5.1): lengths of Azure's conversations, Poisson arrivals,
a hundred adapters of five ranks in equal numbers, small ranks more popular by a power law.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import gamma
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from .tenants import Client, read_maf, read_servegen
from .traces import RequestTrace, TraceError, read_azure, read_gentd26_ids, read_mooncake

RANKS = (8, 16, 32, 64, 128)
_SESSION_RANKS = (32, 64)
_NUM_ADAPTERS = 100
_ZIPF_EXPONENT = 0.9
_LUMP_S = 3.0  # Mooncake's time stamps
_WINDOW_S = 600.0  # ServeGen's

# Lengths of Azure's conversations, for machines without the trace, at these quantiles. Source:
# Azure LLM inference trace 2023 (conversation), first half by time, CC-BY-4.0. Drawn one by one, so
# that the weak correlation of the two (-0.17) is lost.
_QUANTILES = (*(step / 20 for step in range(20)), 0.96, 0.97, 0.98, 0.99, 0.995, 0.999, 1.0)
_CONV_PROMPT_TOKENS = (
    2, 181, 298, 379, 390, 398, 407, 431, 968, 1011, 1035, 1056, 1081, 1105, 1140, 1200, 1317, 2177,
    4075, 4086, 4088, 4091, 4098, 4122, 4145, 5280, 14050,
)  # fmt: skip
_CONV_OUTPUT_TOKENS = (
    7, 38, 50, 60, 72, 81, 88, 94, 102, 114, 140, 167, 211, 377, 393, 397, 404, 414, 428, 463, 496,
    522, 565, 612, 658, 939, 1000,
)  # fmt: skip

_Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Drawn:
    """Columns of a workload, before lengths are divided."""

    arrival_s: NDArray[np.float64]
    prompt_tokens: _Ints
    output_tokens: _Ints
    adapters: _Ints
    ranks: tuple[int, ...]  # by adapter
    p99_output_tokens: float  # of the whole trace
    has_trace: bool = True
    hash_ids: Sequence[tuple[int, ...]] = ()  # see ``RequestTrace``; empty = nobody shares any


@dataclass(frozen=True, slots=True)
class Ask:
    """What is to be drawn."""

    rate_rps: float
    num_requests: int
    traces: Path | None  # where trace files lie
    rng: np.random.Generator


_Adapters = tuple[_Ints, tuple[int, ...]]  # of the requests; ranks by adapter


def _independent(ask: Ask, draw_adapters: Callable[[Ask], _Adapters]) -> Drawn:
    """Azure's conversations, arrivals and adapters each drawn without regard to the others."""
    if ask.traces is None:
        prompt, output = _conv_lengths(ask)
        p99_tokens: float = _CONV_OUTPUT_TOKENS[_QUANTILES.index(0.99)]
    else:
        trace = read_azure(ask.traces, "conv")
        _, picked = _window(trace, ask)
        picked = ask.rng.permutation(picked)
        prompt, output = trace.prompt_tokens[picked], trace.output_tokens[picked]
        p99_tokens = _p99(trace)
    arrival_s = np.cumsum(ask.rng.exponential(1.0 / ask.rate_rps, ask.num_requests))
    adapters, ranks = draw_adapters(ask)
    has_trace = ask.traces is not None
    return Drawn(arrival_s, prompt, output, adapters, ranks, p99_tokens, has_trace)


def _own_clock(ask: Ask, *, kind: str, has_gentd26_ids: bool = False) -> Drawn:
    """Azure's requests as they follow each other, their clock scaled to the rate."""
    trace = read_azure(ask.traces, kind)
    arrival_s, picked = _window(trace, ask)
    return Drawn(
        _scaled(arrival_s, ask),
        trace.prompt_tokens[picked],
        trace.output_tokens[picked],
        *(_gentd26_adapters(ask) if has_gentd26_ids else _ranked_adapters(ask)),
        _p99(trace),
    )


def _sessions(ask: Ask) -> Drawn:
    """Mooncake's conversations on their own clock, thinned to the rate by whole sessions.

    All turns of a session name one adapter. Where the trace ends it begins again, with sessions
    drawn anew that share nothing with those before.
    """
    trace = read_mooncake(ask.traces)
    period_s = trace.arrival_s[-1] + trace.arrival_s[-1] / max(1, len(trace) - 1)
    share = ask.rate_rps * period_s / len(trace)
    if share > 1.0:
        most = len(trace) / period_s
        raise TraceError(f"the trace has {most:.3g} requests/s, not the {ask.rate_rps:g} asked for")
    names, session = np.unique(trace.session, return_inverse=True)
    # Time stamps come in lumps; who is in one came at any time of it.
    picks: list[_Ints] = []
    arrivals: list[NDArray[np.float64]] = []
    while sum(map(len, picks)) < ask.num_requests:
        picked = np.flatnonzero((ask.rng.random(len(names)) < share)[session])
        lumps_s = ask.rng.uniform(0.0, _LUMP_S, len(picked))
        arrivals.append(trace.arrival_s[picked] + lumps_s + len(picks) * period_s)
        picks.append(picked)
    again = np.repeat(np.arange(len(picks)), [len(picked) for picked in picks])
    arrival_s, picked = np.concatenate(arrivals), np.concatenate(picks)
    order = np.argsort(arrival_s, kind="stable")[: ask.num_requests]
    arrival_s, picked, again = arrival_s[order] - arrival_s[order[0]], picked[order], again[order]
    _, who = np.unique(session[picked] + len(names) * again, return_inverse=True)
    adapter_of = _zipf_ids(ask, _NUM_ADAPTERS, ask.num_requests)
    adapters, ranks = _with_drawn_ranks(adapter_of[who], ask, _SESSION_RANKS)
    num_hashes = 1 + max(max(one) for one in trace.hash_ids)
    return Drawn(
        arrival_s,
        trace.prompt_tokens[picked],
        trace.output_tokens[picked],
        adapters,
        ranks,
        _p99(trace),
        hash_ids=[
            tuple(number * num_hashes + one for one in trace.hash_ids[index])
            for index, number in zip(picked.tolist(), again.tolist(), strict=True)
        ],
    )


def _functions(ask: Ask) -> Drawn:
    """An adapter per function of Azure's, called as often by the minute, Poisson within it.

    Calls are thinned to the rate, so that the clock stays the trace's own.
    """
    calls = read_maf(ask.traces)
    trace = read_azure(ask.traces, "conv")
    num_minutes = int(calls.minute.max()) + 1
    thinning = ask.rate_rps * 60.0 * num_minutes / calls.count.sum()
    minute = first = int(ask.rng.integers(num_minutes))
    arrivals: list[NDArray[np.float64]] = []
    functions: list[_Ints] = []
    while sum(map(len, arrivals)) < ask.num_requests:
        here = calls.minute == minute % num_minutes
        counts = ask.rng.poisson(calls.count[here] * thinning)
        arrival_s = (minute - first + np.sort(ask.rng.random(counts.sum()))) * 60.0
        arrivals.append(arrival_s)
        functions.append(ask.rng.permutation(np.repeat(calls.function[here], counts)))
        minute += 1
    arrival_s = np.concatenate(arrivals)[: ask.num_requests]
    adapters, ranks = _with_drawn_ranks(np.concatenate(functions)[: ask.num_requests], ask)
    _, picked = _window(trace, ask)
    picked = ask.rng.permutation(picked)
    prompt, output = trace.prompt_tokens[picked], trace.output_tokens[picked]
    return Drawn(arrival_s, prompt, output, adapters, ranks, _p99(trace))


def _clients(ask: Ask, *, model: str) -> Drawn:
    """An adapter per client of ServeGen's: gaps of the client's own law, slowed to the rate."""
    clients = read_servegen(ask.traces, model)
    starts_s = np.unique(np.concatenate([client.window_s for client in clients]))
    total = sum(float(client.rate_rps.sum()) for client in clients)
    slower = ask.rate_rps * len(starts_s) / total
    first = int(ask.rng.integers(len(starts_s)))
    rows: list[tuple[float, int]] = []
    number = 0
    while len(rows) < ask.num_requests:
        start_s = starts_s[(first + number) % len(starts_s)]
        for index, client in enumerate(clients):
            arrival_s = number * _WINDOW_S + _client_arrivals(client, start_s, slower, ask.rng)
            rows += [(time_s, index) for time_s in arrival_s.tolist()]
        number += 1
    rows = sorted(rows)[: ask.num_requests]
    who = np.array([index for _, index in rows])
    prompt, output = np.empty(len(rows), np.int64), np.empty(len(rows), np.int64)
    for index, client in enumerate(clients):
        for into, law in ((prompt, client.prompt_tokens), (output, client.output_tokens)):
            shares = ask.rng.random(int((who == index).sum()))
            into[who == index] = np.interp(shares, law.shares, law.values)
    adapters, ranks = _with_drawn_ranks(who, ask)
    arrival = np.array([time_s - rows[0][0] for time_s, _ in rows])
    return Drawn(arrival, prompt, output, adapters, ranks, float(np.quantile(output, 0.99)))


def _client_arrivals(
    client: Client, start_s: float, slower: float, rng: np.random.Generator
) -> NDArray[np.float64]:
    """Arrivals of one window, from its start."""
    found = np.flatnonzero(client.window_s == start_s)
    if not len(found) or client.rate_rps[found[0]] * client.shape[found[0]] <= 0.0:
        return np.empty(0)
    rate_rps, shape = slower * client.rate_rps[found[0]], client.shape[found[0]]
    is_gamma = client.is_gamma[found[0]]
    mean = shape if is_gamma else gamma(1.0 + 1.0 / shape)  # of the law with scale 1
    # The window begins somewhere within a gap.
    now_s = -float(rng.random()) / rate_rps
    times_s: list[float] = []
    while True:
        gap = rng.gamma(shape) if is_gamma else rng.weibull(shape)
        now_s += gap / mean / rate_rps
        if now_s >= _WINDOW_S:
            return np.array(times_s)
        if now_s >= 0.0:
            times_s.append(now_s)


def _window(trace: RequestTrace, ask: Ask) -> tuple[NDArray[np.float64], _Ints]:
    """Requests that follow each other, from a drawn one on, and around the trace's end if need be.

    When they arrive, from the first of them on, and which they are. The gap between the trace's
    last request and its first is the mean of all gaps.
    """
    start = int(ask.rng.integers(len(trace)))
    index = start + np.arange(ask.num_requests)
    period_s = trace.arrival_s[-1] + trace.arrival_s[-1] / max(1, len(trace) - 1)
    picked = index % len(trace)
    arrival_s = trace.arrival_s[picked] + (index // len(trace)) * period_s
    return arrival_s - arrival_s[0], picked


def _scaled(arrival_s: NDArray[np.float64], ask: Ask) -> NDArray[np.float64]:
    """The same arrivals at the rate that is asked for."""
    if len(arrival_s) == 1:
        return arrival_s
    if arrival_s[-1] <= 0.0:
        raise TraceError("all requests of the trace's part arrive at once: no rate to scale by")
    rate_rps = (len(arrival_s) - 1) / float(arrival_s[-1])
    return arrival_s * (rate_rps / ask.rate_rps)


def _p99(trace: RequestTrace) -> float:
    return float(np.quantile(trace.output_tokens, 0.99))


def _conv_lengths(ask: Ask) -> tuple[_Ints, _Ints]:
    def draw(values: tuple[int, ...]) -> _Ints:
        shares = ask.rng.random(ask.num_requests)
        return np.interp(shares, _QUANTILES, values).astype(np.int64)

    return draw(_CONV_PROMPT_TOKENS), draw(_CONV_OUTPUT_TOKENS)


def _ranked_adapters(ask: Ask) -> _Adapters:
    """Ranks in equal numbers; the k-th smallest with weight 1/k, adapters of one rank alike."""
    per_rank = _NUM_ADAPTERS // len(RANKS)
    weights = 1.0 / np.arange(1, len(RANKS) + 1)
    rank_index = ask.rng.choice(len(RANKS), ask.num_requests, p=weights / weights.sum())
    adapters = rank_index * per_rank + ask.rng.integers(per_rank, size=ask.num_requests)
    return adapters, tuple(rank for rank in RANKS for _ in range(per_rank))


def _zipf_ids(ask: Ask, num_ids: int, num_drawn: int) -> _Ints:
    """The k-th with weight 1 / k^.9."""
    weights = np.arange(1, num_ids + 1) ** -_ZIPF_EXPONENT
    return ask.rng.choice(num_ids, num_drawn, p=weights / weights.sum())


def _zipf_adapters(ask: Ask, *, num_adapters: int) -> _Adapters:
    return _with_drawn_ranks(_zipf_ids(ask, num_adapters, ask.num_requests), ask)


def _gentd26_adapters(ask: Ask) -> _Adapters:
    """LoRAs in the order of the trace, from a drawn request on."""
    ids = read_gentd26_ids(ask.traces)
    start = int(ask.rng.integers(len(ids)))
    return _with_drawn_ranks(ids[(start + np.arange(ask.num_requests)) % len(ids)], ask)


def _with_drawn_ranks(names: _Ints, ask: Ask, choice: Sequence[int] = RANKS) -> _Adapters:
    """Adapters for what is named; ranks in equal numbers, shuffled."""
    found, adapters = np.unique(names, return_inverse=True)
    ranks = [choice[index % len(choice)] for index in range(len(found))]
    ask.rng.shuffle(ranks)
    return adapters.astype(np.int64), tuple(ranks)


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a workload is made, and the machine that it is meant for."""

    machine: str
    draw: Callable[[Ask], Drawn]
    prompt_divisor: int = 1  # of lengths
    output_divisor: int = 1


_ranked = partial(_independent, draw_adapters=_ranked_adapters)
_zipf = partial(_independent, draw_adapters=partial(_zipf_adapters, num_adapters=300))
_gentd26 = partial(_independent, draw_adapters=_gentd26_adapters)

RECIPES: Mapping[str, Recipe] = {
    "S1": Recipe("a40-llama7b", _ranked),
    "S2": Recipe("a40-llama7b", _ranked, prompt_divisor=5, output_divisor=5),
    "S3": Recipe("a40-llama8b", partial(_own_clock, kind="conv", has_gentd26_ids=True)),
    "S4": Recipe("a40-llama7b", partial(_own_clock, kind="code")),
    "S5": Recipe("a40-llama7b", partial(_own_clock, kind="conv", has_gentd26_ids=True)),
    "zipf": Recipe("a40-llama8b", _zipf, prompt_divisor=5, output_divisor=5),
    "gentd26": Recipe("a40-llama8b", _gentd26, prompt_divisor=5, output_divisor=5),
    "mooncake-16": Recipe("a40-llama7b", _sessions, prompt_divisor=16, output_divisor=4),
    "mooncake-8": Recipe("a40-llama7b", _sessions, prompt_divisor=8, output_divisor=4),
    "maf": Recipe("a40-llama7b", _functions),
    "servegen": Recipe("a40-llama8b", partial(_clients, model="m-small")),
    # For models so small that a CPU serves them.
    "S1-16": Recipe("a40-llama7b", _ranked, prompt_divisor=16, output_divisor=16),
    "S5-16": Recipe(
        "a40-llama7b",
        partial(_own_clock, kind="conv", has_gentd26_ids=True),
        prompt_divisor=16,
        output_divisor=16,
    ),
}

"""Draws the requests of a workload from traces of real traffic.

Traces with sessions, functions or clients keep their own clock, and decide the adapter of each
request.
"""

from math import gamma

import numpy as np
from numpy.typing import NDArray

from ..draw_inputs import DrawInputs, Drawn, Ints
from ..draws import draw_arrivals, scaled
from ..popularity import draw_adapters, with_drawn_ranks
from ..workload_spec import WorkloadSpec
from .tenants import Client, read_maf, read_servegen
from .traces import RequestTrace, read_azure, read_gentd26_ids, read_mooncake

_LUMP_S = 3.0  # Mooncake's time stamps
_WINDOW_S = 600.0  # ServeGen's


def draw_columns(spec: WorkloadSpec, inputs: DrawInputs) -> Drawn:
    """Draw the columns of ``draws.draw_columns`` from traces. Raises ``TraceError``."""
    if spec.arrivals.process == "trace":
        if spec.has_trace_sessions:
            return _sessions(spec, inputs)
        if spec.adapters.popularity == "maf":
            return _functions(spec, inputs)
        if spec.adapters.popularity == "clients":
            return _clients(spec, inputs)
    return _independent(spec, inputs)


def draw_names(inputs: DrawInputs, popularity: str) -> Ints:
    """Draw the name of each request's adapter, a number, from a trace. Raises ``TraceError``."""
    if popularity == "gentd26":
        ids = read_gentd26_ids(inputs.traces)
        start = int(inputs.rng.integers(len(ids)))
        return ids[(start + np.arange(inputs.num_requests)) % len(ids)]
    assert popularity == "maf", popularity
    calls = read_maf(inputs.traces)
    counts = np.bincount(calls.function, weights=calls.count)
    return inputs.rng.choice(len(counts), inputs.num_requests, p=counts / counts.sum())


def _independent(spec: WorkloadSpec, inputs: DrawInputs) -> Drawn:
    """Adapters independent of lengths; arrivals as well, unless they keep the trace's clock."""
    is_own_clock = spec.arrivals.process == "trace"
    trace = _read_requests(spec.lengths.source, inputs)
    own_s, picked = _window(trace, inputs)
    if not is_own_clock:
        picked = inputs.rng.permutation(picked)
    arrival_s = scaled(own_s, inputs) if is_own_clock else draw_arrivals(spec.arrivals, inputs)
    adapters, ranks = draw_adapters(inputs, spec.adapters)
    return Drawn(
        arrival_s, trace.prompt_tokens[picked], trace.output_tokens[picked], adapters, ranks, _p99(trace)
    )


def _read_requests(source: str, inputs: DrawInputs) -> RequestTrace:
    if source == "mooncake":
        return read_mooncake(inputs.traces)
    return read_azure(inputs.traces, source.removeprefix("azure-"))


def _sessions(spec: WorkloadSpec, inputs: DrawInputs) -> Drawn:
    """Mooncake's conversations on their own clock, thinned to the rate by whole sessions.

    Beyond the rate of all conversations their clock runs faster. All turns of a session name one
    adapter. At its end the trace starts again with newly drawn sessions, which share nothing with
    earlier ones.
    """
    trace = read_mooncake(inputs.traces)
    period_s = trace.arrival_s[-1] + trace.arrival_s[-1] / max(1, len(trace) - 1)
    share = inputs.rate_rps * period_s / len(trace)
    names, session = np.unique(trace.session, return_inverse=True)
    # Time stamps come in lumps; a request arrives at a random time of its lump.
    picks: list[Ints] = []
    arrivals: list[NDArray[np.float64]] = []
    while sum(map(len, picks)) < inputs.num_requests:
        picked = np.flatnonzero((inputs.rng.random(len(names)) < share)[session])
        lumps_s = inputs.rng.uniform(0.0, _LUMP_S, len(picked))
        arrivals.append(trace.arrival_s[picked] + lumps_s + len(picks) * period_s)
        picks.append(picked)
    again = np.repeat(np.arange(len(picks)), [len(picked) for picked in picks])
    arrival_s, picked = np.concatenate(arrivals), np.concatenate(picks)
    order = np.argsort(arrival_s, kind="stable")[: inputs.num_requests]
    arrival_s = (arrival_s[order] - arrival_s[order[0]]) / max(1.0, share)
    picked, again = picked[order], again[order]
    _, session_ids = np.unique(session[picked] + len(names) * again, return_inverse=True)
    adapters, ranks = draw_adapters(inputs, spec.adapters, session_ids)
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
        session=session_ids,
    )


def _functions(spec: WorkloadSpec, inputs: DrawInputs) -> Drawn:
    """An adapter per Azure function: its calls per minute, Poisson within each minute.

    Calls are thinned to the rate, so the clock stays the trace's own.
    """
    calls = read_maf(inputs.traces)
    trace = _read_requests(spec.lengths.source, inputs)
    num_minutes = int(calls.minute.max()) + 1
    thinning = inputs.rate_rps * 60.0 * num_minutes / calls.count.sum()
    minute = first = int(inputs.rng.integers(num_minutes))
    arrivals: list[NDArray[np.float64]] = []
    functions: list[Ints] = []
    while sum(map(len, arrivals)) < inputs.num_requests:
        here = calls.minute == minute % num_minutes
        counts = inputs.rng.poisson(calls.count[here] * thinning)
        arrival_s = (minute - first + np.sort(inputs.rng.random(counts.sum()))) * 60.0
        arrivals.append(arrival_s)
        functions.append(inputs.rng.permutation(np.repeat(calls.function[here], counts)))
        minute += 1
    arrival_s = np.concatenate(arrivals)[: inputs.num_requests]
    adapters, ranks = with_drawn_ranks(
        np.concatenate(functions)[: inputs.num_requests], inputs, spec.adapters.ranks
    )
    _, picked = _window(trace, inputs)
    picked = inputs.rng.permutation(picked)
    prompt, output = trace.prompt_tokens[picked], trace.output_tokens[picked]
    return Drawn(arrival_s, prompt, output, adapters, ranks, _p99(trace))


def _clients(spec: WorkloadSpec, inputs: DrawInputs) -> Drawn:
    """An adapter per ServeGen client: gaps of the client's own distribution, scaled to the rate."""
    clients = read_servegen(inputs.traces, spec.lengths.source.removeprefix("servegen-"))
    starts_s = np.unique(np.concatenate([client.window_s for client in clients]))
    total = sum(float(client.rate_rps.sum()) for client in clients)
    slower = inputs.rate_rps * len(starts_s) / total
    first = int(inputs.rng.integers(len(starts_s)))
    rows: list[tuple[float, int]] = []
    number = 0
    while len(rows) < inputs.num_requests:
        start_s = starts_s[(first + number) % len(starts_s)]
        for index, client in enumerate(clients):
            arrival_s = number * _WINDOW_S + _client_arrivals(client, start_s, slower, inputs.rng)
            rows += [(time_s, index) for time_s in arrival_s.tolist()]
        number += 1
    rows = sorted(rows)[: inputs.num_requests]
    client_ids = np.array([index for _, index in rows])
    prompt, output = np.empty(len(rows), np.int64), np.empty(len(rows), np.int64)
    for index, client in enumerate(clients):
        for into, law in ((prompt, client.prompt_tokens), (output, client.output_tokens)):
            shares = inputs.rng.random(int((client_ids == index).sum()))
            into[client_ids == index] = np.interp(shares, law.shares, law.values)
    adapters, ranks = with_drawn_ranks(client_ids, inputs, spec.adapters.ranks)
    arrival = np.array([time_s - rows[0][0] for time_s, _ in rows])
    return Drawn(arrival, prompt, output, adapters, ranks, float(np.quantile(output, 0.99)))


def _client_arrivals(
    client: Client, start_s: float, slower: float, rng: np.random.Generator
) -> NDArray[np.float64]:
    found = np.flatnonzero(client.window_s == start_s)
    if not len(found) or client.rate_rps[found[0]] * client.shape[found[0]] <= 0.0:
        return np.empty(0)
    rate_rps, shape = slower * client.rate_rps[found[0]], client.shape[found[0]]
    is_gamma = client.is_gamma[found[0]]
    mean = shape if is_gamma else gamma(1.0 + 1.0 / shape)  # of the law with scale 1
    # The window begins at a random point of a gap.
    now_s = -float(rng.random()) / rate_rps
    times_s: list[float] = []
    while True:
        gap = rng.gamma(shape) if is_gamma else rng.weibull(shape)
        now_s += gap / mean / rate_rps
        if now_s >= _WINDOW_S:
            return np.array(times_s)
        if now_s >= 0.0:
            times_s.append(now_s)


def _window(trace: RequestTrace, inputs: DrawInputs) -> tuple[NDArray[np.float64], Ints]:
    """Consecutive requests from a random one on, which wrap around at the trace's end.

    Returns arrival times, counted from the first of them, and indices. The gap between the
    trace's last request and its first is the mean of all gaps.
    """
    start = int(inputs.rng.integers(len(trace)))
    index = start + np.arange(inputs.num_requests)
    period_s = trace.arrival_s[-1] + trace.arrival_s[-1] / max(1, len(trace) - 1)
    picked = index % len(trace)
    arrival_s = trace.arrival_s[picked] + (index // len(trace)) * period_s
    return arrival_s - arrival_s[0], picked


def _p99(trace: RequestTrace) -> float:
    return float(np.quantile(trace.output_tokens, 0.99))

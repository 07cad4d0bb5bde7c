"""Draws the requests of a workload: lengths and arrivals, from laws, or from traces by papers."""

import numpy as np
from numpy.typing import NDArray

from .draw_inputs import DrawInputs, Drawn, Ints, TraceError
from .popularity import draw_adapters
from .registry import draw_from_traces
from .workload_spec import ArrivalSpec, LengthSpec, WorkloadSpec

# Lengths of Azure's conversations, for machines without the trace, at these quantiles. Source:
# Azure LLM inference trace 2023 (conversation), first half by time, CC-BY-4.0. Drawn one by one, so
# that the weak correlation of the two (-0.17) is lost.
_QUANTILES = (*(step / 20 for step in range(20)), 0.96, 0.97, 0.98, 0.99, 0.995, 0.999, 1.0)
_CONV_PROMPT_TOKENS = (
    2,
    181,
    298,
    379,
    390,
    398,
    407,
    431,
    968,
    1011,
    1035,
    1056,
    1081,
    1105,
    1140,
    1200,
    1317,
    2177,
    4075,
    4086,
    4088,
    4091,
    4098,
    4122,
    4145,
    5280,
    14050,
)
_CONV_OUTPUT_TOKENS = (
    7,
    38,
    50,
    60,
    72,
    81,
    88,
    94,
    102,
    114,
    140,
    167,
    211,
    377,
    393,
    397,
    404,
    414,
    428,
    463,
    496,
    522,
    565,
    612,
    658,
    939,
    1000,
)


def draw_columns(spec: WorkloadSpec, inputs: DrawInputs) -> Drawn:
    """Draw all columns but the sessions that no trace has. Raises ``TraceError``."""
    source = spec.lengths.source
    is_table = source == "azure-conv" and inputs.traces is None
    if spec.arrivals.process == "trace" or not (is_table or source == "fixed"):
        return draw_from_traces(spec, inputs)
    prompt, output, p99_tokens = _conv_lengths(inputs) if is_table else _fixed(spec.lengths, inputs)
    arrival_s = draw_arrivals(spec.arrivals, inputs)
    adapters, ranks = draw_adapters(inputs, spec.adapters)
    return Drawn(arrival_s, prompt, output, adapters, ranks, p99_tokens, has_trace=not is_table)


def draw_arrivals(spec: ArrivalSpec, inputs: DrawInputs) -> NDArray[np.float64]:
    """Arrival times with independent gaps, at the average rate of ``inputs``."""
    mean_s = 1.0 / inputs.rate_rps
    if spec.process == "gamma":
        shape = spec.cv**-2
        return np.cumsum(inputs.rng.gamma(shape, mean_s / shape, inputs.num_requests))
    if spec.process == "poisson":
        return np.cumsum(inputs.rng.exponential(mean_s, inputs.num_requests))
    assert spec.process == "on-off", spec.process
    on_share = spec.on_s / (spec.on_s + spec.off_s)
    busy_s = np.cumsum(inputs.rng.exponential(mean_s * on_share, inputs.num_requests))
    off_s: NDArray[np.float64] = busy_s // spec.on_s * spec.off_s
    return busy_s + off_s


def scaled(arrival_s: NDArray[np.float64], inputs: DrawInputs) -> NDArray[np.float64]:
    """The same arrivals at the rate of ``inputs``. Raises ``TraceError`` if they have none."""
    if len(arrival_s) == 1:
        return arrival_s
    if arrival_s[-1] <= 0.0:
        raise TraceError("all requests of the trace's part arrive at once: no rate to scale by")
    rate_rps = (len(arrival_s) - 1) / float(arrival_s[-1])
    return arrival_s * (rate_rps / inputs.rate_rps)


def _fixed(spec: LengthSpec, inputs: DrawInputs) -> tuple[Ints, Ints, float]:
    prompt, output = (
        np.full(inputs.num_requests, tokens, np.int64) for tokens in (spec.prompt_tokens, spec.output_tokens)
    )
    return prompt, output, float(spec.output_tokens)


def _conv_lengths(inputs: DrawInputs) -> tuple[Ints, Ints, float]:
    def draw(values: tuple[int, ...]) -> Ints:
        shares = inputs.rng.random(inputs.num_requests)
        return np.interp(shares, _QUANTILES, values).astype(np.int64)

    prompt, output = draw(_CONV_PROMPT_TOKENS), draw(_CONV_OUTPUT_TOKENS)
    return prompt, output, _CONV_OUTPUT_TOKENS[_QUANTILES.index(0.99)]

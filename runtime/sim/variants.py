"""The variants of a study: values of options, and loads. Pure."""

import itertools
import math
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..config.engine import EngineConfig
from ..config.option import OptionSpec, check_value, option_specs, parse_text, suggestion
from ..config.simulate import SimulateConfig, takes
from ..errors import ConfigError
from .workload_spec import WorkloadSpec

MAX_RUNS = 1000
# Options of ``SimulateConfig`` that may differ between runs, besides all of the engine's.
_OWN = (
    "workload",
    "servers",
    "router",
    "placement",
    "placement_every_s",
    "routers",
    "state_age_s",
    "store_bytes",
    "peer_gib_per_s",
)


@dataclass(frozen=True, slots=True)
class Variant:
    """One value of each compared option."""

    name: str  # "scheduling-policy=corun"; "" = no options are compared
    engine: EngineConfig
    config: SimulateConfig
    compared: frozenset[str]  # names of options


def variants_of(engine: EngineConfig, config: SimulateConfig) -> list[Variant]:
    """Every combination of what ``--compare`` lists.

    Raises ``ConfigError`` for an option that cannot be compared, or a value that it rejects.
    """
    axes = [_axis(text) for text in config.compare]
    specs = [spec for spec, _ in axes]
    names = frozenset(spec.name for spec in specs)
    if len(names) < len(specs):
        raise ConfigError("--compare names an option twice; list its values with commas")
    found = []
    for values in itertools.product(*(values for _, values in axes)):
        changes = {spec.name: value for spec, value in zip(specs, values, strict=True)}
        own = {name: changes.pop(name) for name in _OWN if name in changes}
        texts = (f"{spec.key}={value}" for spec, value in zip(specs, values, strict=True))
        found.append(Variant(", ".join(texts), replace(engine, **changes), replace(config, **own), names))
    return found


def rates_of(config: SimulateConfig, workload: WorkloadSpec) -> list[float | None]:
    """The loads of ``--sweep``, or the load of ``--rps`` or of the workload, in requests/s.

    None = a log's own clock. Raises ``ConfigError`` if no load is given, or a sweep has none.
    """
    if config.sweep is None:
        rate_rps = config.rps or workload.rps
        if rate_rps is None and workload.json_lines is None:
            raise ConfigError(
                "how many requests arrive per second? Give --rps R, or --sweep rps=FROM:TO:STEP"
            )
        return [rate_rps]
    if config.rps is not None:
        raise ConfigError("--rps and --sweep exclude each other")
    name, _, text = config.sweep.partition("=")
    try:
        low, high, step = (float(part) for part in text.split(":"))
    except ValueError:
        low = high = step = math.nan
    if name != "rps" or not all(map(math.isfinite, (low, high, step))):
        raise ConfigError(f"--sweep is {config.sweep!r}, expected rps=FROM:TO:STEP")
    if not 0.0 < low <= high or step <= 0.0:
        raise ConfigError(
            f"--sweep is {config.sweep!r}: FROM must be above 0 and not above TO, and STEP above 0"
        )
    number = math.floor((high - low) / step * (1 + 1e-9)) + 1
    if number > MAX_RUNS:
        raise ConfigError(f"--sweep is {config.sweep!r}: {number} loads, {MAX_RUNS} are the most")
    return [float(f"{low + index * step:.6g}") for index in range(number)]


def _axis(text: str) -> tuple[OptionSpec, list[Any]]:
    key, equals, listed = text.partition("=")
    specs = {
        spec.key: spec
        for cls in (EngineConfig, SimulateConfig)
        for spec in option_specs(cls)
        if takes(spec, "simulate") and (cls is EngineConfig or spec.name in _OWN)
    }
    spec = specs.get(key.removeprefix("--").replace("_", "-"))
    if spec is None:
        near = suggestion(key, specs)
        raise ConfigError(f"--compare {text}: there is no option {key!r} to compare{near}")
    # Options of a policy, such as ``chameleon:queues=2,refresh=60``, belong to its name.
    values = re.split(r",(?![\w-]+=)", listed)
    if not equals or not all(part.strip() for part in values):
        raise ConfigError(f"--compare is {text!r}, expected OPTION=A,B")
    label = f"--compare {spec.key}"
    return spec, [
        check_value(spec, parse_text(spec, part.strip(), label=label), label=label) for part in values
    ]


def check_number(num_variants: int, num_rates: int, num_seeds: int) -> None:
    """Raise ``ConfigError`` if there are more than ``MAX_RUNS`` runs."""
    number = num_variants * num_rates * num_seeds
    if number > MAX_RUNS:
        raise ConfigError(
            f"{num_variants} variants at {num_rates} loads with {num_seeds} seeds are {number} "
            f"runs, {MAX_RUNS} are the most; --compare, --sweep and --seeds say how many"
        )


def specs_of(config: SimulateConfig, workload: WorkloadSpec, rate_rps: float | None) -> list[WorkloadSpec]:
    """The workload at this load, once for each seed; seeds count up from its own."""
    changes: dict[str, Any] = {"rps": rate_rps}
    if config.requests is not None:
        changes |= {"requests": config.requests, "duration_s": None}
    return [replace(workload, seed=workload.seed + number, **changes) for number in range(config.seeds)]


def spread_of(values: Sequence[float]) -> tuple[float, float, float]:
    """Median, least and largest."""
    return statistics.median(values), min(values), max(values)

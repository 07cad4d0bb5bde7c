"""Traces of tenants without single requests: how much each tenant sends, and when."""

import ast
import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..draw_inputs import TraceError
from .traces import checked_numbers, find_trace, read_parquet

_MAX_FUNCTIONS = 500  # the most called ones


@dataclass(frozen=True, slots=True)
class CallCounts:
    """Calls by function and minute; one element per pair with calls, in each array."""

    function: NDArray[np.int64]  # 0 = the one that is called most
    minute: NDArray[np.int64]  # from the first one
    count: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution: values with their cumulative shares."""

    values: NDArray[np.float64]
    shares: NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Client:
    """One tenant's arrivals, by window, and lengths."""

    window_s: NDArray[np.float64]  # when each window begins, ascending
    rate_rps: NDArray[np.float64]
    is_gamma: NDArray[np.bool_]  # how gaps are distributed; else Weibull
    shape: NDArray[np.float64]  # of that law
    prompt_tokens: Lengths
    output_tokens: Lengths


def read_maf(directory: Path | None) -> CallCounts:
    """Read calls of Azure Functions, 2019 (one day of it). Raises ``TraceError``.

    Original: invocations_per_function_md.anon.d01.csv, a row per function, a column per minute.
    """
    names = ("invocations_per_function_md.anon.d01.csv", "maf2019_500x480_counts.parquet")
    path = find_trace(directory, "the Azure Functions trace 2019", names)
    if path.suffix == ".parquet":
        columns = read_parquet(path, ("adapter", "minute", "count"))
        function, minute, count = (
            checked_numbers(path, name, values).astype(np.int64)
            for name, values in zip(("function", "minute", "count"), columns, strict=True)
        )
        return CallCounts(function, minute - minute.min(), count)
    return _calls_of_csv(path)


def read_servegen(directory: Path | None, model: str) -> tuple[Client, ...]:
    """Read the clients of one of ServeGen's language models ("m-small"). Raises ``TraceError``.

    Original: the directory of that name, with chunk-*-trace.csv (window, rate, CV, law and its
    two parameters) and chunk-*-dataset.json (lengths by window).
    """
    names = (f"{model}/chunk-*-trace.csv", f"servegen_{model}_rates.parquet")
    path = find_trace(directory, f"ServeGen's clients of {model}", names)
    if path.suffix == ".parquet":
        return _clients_of_parquet(path, model)
    clients = []
    for trace in sorted(path.parent.glob("chunk-*-trace.csv")):
        dataset = trace.with_name(trace.name.replace("-trace.csv", "-dataset.json"))
        with trace.open(newline="", encoding="utf-8") as file:
            rows = list(csv.reader(file))
        cut = next((number for number, row in enumerate(rows, start=1) if len(row) != 6), None)
        if cut is not None:
            raise TraceError(f"{trace}, line {cut} has {len(rows[cut - 1])} fields, not 6")
        windows = [(row[0], row[1], row[3], row[4]) for row in rows if row[3]]
        if windows:
            clients.append(_client(trace, windows, _lengths_of_json(dataset)))
    if not clients:
        raise TraceError(f"{path.parent} holds no request")
    return tuple(clients)


def _calls_of_csv(path: Path) -> CallCounts:
    counts = []
    with path.open(newline="", encoding="utf-8") as file:
        rows = csv.reader(file)
        header = next(rows, [])
        if header[3:5] != ["Trigger", "1"]:
            raise TraceError(f"{path} has no columns Trigger and 1 behind each other")
        for row in rows:
            try:
                counts.append(np.array(row[4:], dtype=np.int64))
            except ValueError as error:
                raise TraceError(f"{path}, line {rows.line_num}: {error}") from error
            if len(row) != len(header) or (counts[-1] < 0).any():
                raise TraceError(f"{path}, line {rows.line_num} is cut or has a negative count")
    if not counts:
        raise TraceError(f"{path} holds no request")
    counts.sort(key=lambda one: -int(one.sum()))
    table = np.stack(counts[:_MAX_FUNCTIONS])
    function, minute = np.nonzero(table)
    return CallCounts(function, minute, table[function, minute])


def _clients_of_parquet(path: Path, model: str) -> tuple[Client, ...]:
    windows: dict[int, list[tuple[Any, ...]]] = {}
    for client, *window in zip(*read_parquet(path, ("client", "window_s", "rate", "pat", "p1")), strict=True):
        windows.setdefault(client, []).append(tuple(window))
    beside = path.with_name("servegen_length_quantiles.parquet")
    if not beside.is_file():
        raise TraceError(f"{path.parent} does not hold {beside.name}, the lengths of its clients")
    lengths: dict[int, dict[str, Lengths]] = {}
    for name, client, field, quantiles in zip(
        *read_parquet(beside, ("model", "client", "field", "q")), strict=True
    ):
        if name == model and field not in lengths.setdefault(client, {}):  # of the first week
            values = checked_numbers(beside, field, quantiles)
            lengths[client][field] = Lengths(values, np.linspace(0.0, 1.0, len(values)))
    return tuple(
        _client(path, windows[client], lengths[client])
        for client in sorted(windows)
        if len(lengths.get(client, {})) == 2
    )


def _client(path: Path, windows: Sequence[tuple[Any, ...]], lengths: Mapping[str, Lengths]) -> Client:
    """``windows``: start, rate, name of the law and its shape."""
    try:
        rows = sorted(
            (float(start), float(rate), str(law), float(shape)) for start, rate, law, shape in windows
        )
    except (TypeError, ValueError) as error:
        raise TraceError(f"{path}: {error}") from error
    start_s, rate_rps, laws, shape = zip(*rows, strict=True)
    unknown = set(laws) - {"Gamma", "Weibull"}
    if unknown:
        raise TraceError(f"{path} has gaps that are {sorted(unknown)[0]}, not Gamma or Weibull")
    return Client(
        checked_numbers(path, "window", start_s),
        checked_numbers(path, "rate", rate_rps),
        np.array([law == "Gamma" for law in laws]),
        checked_numbers(path, "shape", shape),
        lengths["input_tokens"],
        lengths["output_tokens"],
    )


def _lengths_of_json(path: Path) -> dict[str, Lengths]:
    """All windows of a client together: each holds a text like "{100: 0.5, 120: 0.5}"."""
    sums: dict[str, dict[int, float]] = {"input_tokens": {}, "output_tokens": {}}
    try:
        for window in json.loads(path.read_text(encoding="utf-8")).values():
            for field, weights in sums.items():
                for value, weight in ast.literal_eval(window[field]).items():
                    weights[int(value)] = weights.get(int(value), 0.0) + float(weight)
    except FileNotFoundError as error:
        raise TraceError(f"{path.parent} does not hold {path.name}") from error
    except KeyError as error:
        raise TraceError(f"{path}: there is no {error}") from error
    except (AttributeError, SyntaxError, TypeError, ValueError) as error:
        raise TraceError(f"{path}: {error}") from error
    return {field: _lengths_of_weights(path, field, weights) for field, weights in sums.items()}


def _lengths_of_weights(path: Path, field: str, weights: Mapping[int, float]) -> Lengths:
    if not weights:
        raise TraceError(f"{path} has no {field}")
    values = sorted(weights)
    shares = np.cumsum(checked_numbers(path, f"weight of {field}", [weights[v] for v in values]))
    return Lengths(checked_numbers(path, field, values), shares / shares[-1])

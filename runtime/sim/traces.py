"""Reads traces of real traffic: the public originals, or parquet files with the same columns.

A trace lies in a directory that the user names; nothing is downloaded. Every file is checked as
it is read, so that a cut or damaged one is an error and never a shorter workload.
"""

import csv
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigError

DIRECTORY_VARIABLE = "CORUN_TRACES"


class TraceError(ConfigError):
    """A trace is missing, or its file does not hold what it should."""


@dataclass(frozen=True, slots=True)
class RequestTrace:
    """Requests by arrival; one element per request in each array."""

    arrival_s: NDArray[np.float64]  # from the first one, never falling
    prompt_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.arrival_s)


@dataclass(frozen=True, slots=True)
class _Source:
    """Where a trace comes from: what its files may be called, and what people call it."""

    title: str
    parquet: str
    original: str  # the name of the public file


_AZURE = {
    kind: _Source(
        f"the Azure LLM inference trace 2023 ({kind})",
        f"azure2023_{kind}.parquet",
        f"AzureLLMInferenceTrace_{kind}.csv",
    )
    for kind in ("conv", "code")
}
_GENTD26 = _Source("the GenTD26 trace of LoRA ids", "gentd26_lora.parquet", "gentd26_lora.csv")


def trace_directory(option: str | None = None) -> Path | None:
    """The directory that ``option``, else the environment names; None if neither does."""
    named = option or os.environ.get(DIRECTORY_VARIABLE)
    return Path(named) if named else None


def read_azure(directory: Path | None, kind: str) -> RequestTrace:
    """Read the conversation ("conv") or the code ("code") trace of Azure, 2023.

    Raises ``TraceError``.
    """
    path = _find(directory, _AZURE[kind])
    if path.suffix == ".parquet":
        names = ("arrival_s", "prompt_tokens", "output_tokens")
        columns = _read_parquet(path, names)
        arrival_s, prompt, output = (columns[name] for name in names)
    else:
        stamps, prompt, output = _read_csv(path, _AZURE_COLUMNS)
        arrival_s = [stamp - stamps[0] for stamp in stamps]
    return _checked(path, arrival_s, prompt, output)


def read_gentd26_ids(directory: Path | None) -> NDArray[np.int64]:
    """The LoRA that each request of GenTD26 names, in their order.

    Requests without one are left out; of one that names several the first counts. Raises
    ``TraceError``.
    """
    path = _find(directory, _GENTD26)
    if path.suffix == ".parquet":
        named = _read_parquet(path, ("lora_ids",))["lora_ids"]
    else:
        (named,) = _read_csv(path, {"lora_ids": _ids})
    ids = np.array([each[0] for each in named if len(each)], dtype=np.int64)
    if not len(ids):
        raise TraceError(f"{path} names no LoRA")
    if (ids < 0).any():
        raise TraceError(f"{path} has a negative LoRA id")
    return ids


def _find(directory: Path | None, source: _Source) -> Path:
    if directory is None:
        raise TraceError(
            f"this workload needs {source.title}: name the directory with {source.original} or "
            f"{source.parquet} by --traces or {DIRECTORY_VARIABLE}"
        )
    for name in (source.parquet, source.original):
        if (directory / name).is_file():
            return directory / name
    raise TraceError(f"{directory} holds neither {source.original} nor {source.parquet}")


def _read_parquet(path: Path, names: Sequence[str]) -> Mapping[str, Sequence[Any]]:
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise TraceError(f"{path} needs pyarrow: pip install 'corun[dev]'") from error
    try:
        table = parquet.read_table(path)
    # A truncated file fails in the footer, a damaged one in a page: all mean this.
    except Exception as error:
        raise TraceError(f"{path} cannot be read: {error}") from error
    missing = [name for name in names if name not in table.column_names]
    if missing:
        raise TraceError(f"{path} has no column {missing[0]} (it has {table.column_names})")
    return {name: table[name].to_pylist() for name in names}


def _seconds(text: str) -> float:
    """Seconds of a time stamp like "2023-11-16 18:15:46.6805900"."""
    return datetime.fromisoformat(text[:26]).timestamp()


def _ids(text: str) -> list[int]:
    return [int(part) for part in text.strip("[]").split(",") if part.strip()]


_AZURE_COLUMNS: Mapping[str, Callable[[str], Any]] = {
    "TIMESTAMP": _seconds,
    "ContextTokens": int,
    "GeneratedTokens": int,
}


def _read_csv(path: Path, columns: Mapping[str, Callable[[str], Any]]) -> list[list[Any]]:
    """The columns of a CSV file with a header, in the order of ``columns``."""
    values: list[list[Any]] = [[] for _ in columns]
    with path.open(newline="", encoding="utf-8") as file:
        rows = csv.DictReader(file)
        missing = [name for name in columns if name not in (rows.fieldnames or ())]
        if missing:
            raise TraceError(f"{path} has no column {missing[0]} (it has {rows.fieldnames})")
        for row in rows:
            for into, (name, parse) in zip(values, columns.items(), strict=True):
                try:
                    into.append(parse(row[name] or ""))
                except ValueError as error:
                    where = f"{path}, line {rows.line_num}"
                    raise TraceError(f"{where}: {name} is {row[name]!r}") from error
    if not values[0]:
        raise TraceError(f"{path} holds no request")
    return values


def _checked(
    path: Path, arrival_s: Sequence[float], prompt: Sequence[int], output: Sequence[int]
) -> RequestTrace:
    if not len(arrival_s):
        raise TraceError(f"{path} holds no request")
    times, prompts, outputs = (
        np.array([np.nan if value is None else value for value in column], dtype=np.float64)
        for column in (arrival_s, prompt, output)
    )
    for name, values in (("arrival", times), ("prompt", prompts), ("output", outputs)):
        wrong = np.flatnonzero(~np.isfinite(values) | (values < 0))
        if len(wrong):
            row = int(wrong[0])
            raise TraceError(f"{path}: the {name} of request {row} is {values[row]}")
    falling = np.flatnonzero(np.diff(times) < 0)
    if len(falling):
        raise TraceError(f"{path}: request {int(falling[0]) + 1} arrives before the one above it")
    return RequestTrace(times - times[0], prompts.astype(np.int64), outputs.astype(np.int64))

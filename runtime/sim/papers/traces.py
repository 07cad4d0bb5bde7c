"""Reads traces of real traffic: the public originals, or parquet files with the same columns.

Traces are in a directory that the user names; nothing is downloaded. Every file is checked as it is
read, so a truncated or damaged one is an error and never a shorter workload.
"""

import csv
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..draw_inputs import DIRECTORY_VARIABLE, TraceError


@dataclass(frozen=True, slots=True)
class RequestTrace:
    """Requests by arrival; one element per request in each array."""

    arrival_s: NDArray[np.float64]  # from the first one, never falling
    prompt_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    session: NDArray[np.int64]  # the conversation that it belongs to; empty = not known
    # Of its prompt: each identifies ``HASHED_TOKENS`` tokens and all before them; empty = unknown.
    hash_ids: tuple[tuple[int, ...], ...] = ()

    def __len__(self) -> int:
        return len(self.arrival_s)


def read_azure(directory: Path | None, kind: str) -> RequestTrace:
    """Read the conversation ("conv") or the code ("code") trace of Azure, 2023.

    Original: AzureLLMInferenceTrace_*.csv. Raises ``TraceError``.
    """
    names = (f"AzureLLMInferenceTrace_{kind}.csv", f"azure2023_{kind}.parquet")
    path = find_trace(directory, f"the Azure LLM inference trace 2023 ({kind})", names)
    if path.suffix == ".parquet":
        return _checked(path, *read_parquet(path, _REQUEST_COLUMNS))
    stamps, prompt, output = _read_csv(path, _AZURE_COLUMNS)
    return _checked(path, [(stamp - stamps[0]).total_seconds() for stamp in stamps], prompt, output)


def read_mooncake(directory: Path | None) -> RequestTrace:
    """Read Mooncake's conversations with their sessions. Raises ``TraceError``.

    Original: conversation_trace.jsonl. Its requests carry hashes of their blocks of 512 tokens;
    the first block is the same for all, the second one's hash is the session's.
    """
    names = ("conversation_trace.jsonl", "mooncake_conversation.parquet")
    path = find_trace(directory, "Mooncake's trace of conversations", names)
    if path.suffix == ".parquet":
        arrival_s, prompt, output, hashes = read_parquet(path, (*_REQUEST_COLUMNS, "hash_ids"))
    else:
        stamps_ms, prompt, output, hashes = _read_jsonl(path, _MOONCAKE_FIELDS)
        arrival_s = [(stamp - stamps_ms[0]) / 1e3 for stamp in stamps_ms]
    hash_ids = tuple(_checked_hashes(path, row, each) for row, each in enumerate(hashes))
    session = [each[min(1, len(each) - 1)] for each in hash_ids]
    return replace(_checked(path, arrival_s, prompt, output, session), hash_ids=hash_ids)


def read_gentd26_ids(directory: Path | None) -> NDArray[np.int64]:
    """The LoRA id of each request of GenTD26, in order.

    Requests without one are left out; if a request names several, the first counts. Raises
    ``TraceError``.
    """
    path = find_trace(directory, "the GenTD26 trace of LoRA ids", ("gentd26_lora.parquet",))
    (named,) = read_parquet(path, ("lora_ids",))
    ids = np.array([each[0] for each in named if each], dtype=np.int64)
    if not len(ids):
        raise TraceError(f"{path} names no LoRA")
    if (ids < 0).any():
        raise TraceError(f"{path} has a negative LoRA id")
    return ids


def find_trace(directory: Path | None, title: str, names: Sequence[str]) -> Path:
    """Return the first of ``names`` that is there. Raises ``TraceError``."""
    wanted = " or ".join(names)
    if directory is None:
        raise TraceError(
            f"this workload needs {title}: name the directory of {wanted} by --traces or {DIRECTORY_VARIABLE}"
        )
    for name in names:
        if any(directory.glob(name)):
            return directory / name
    raise TraceError(f"{directory} does not hold {title} ({wanted})")


def read_parquet(path: Path, names: Sequence[str]) -> list[list[Any]]:
    """Read columns, in the order of ``names``. Raises ``TraceError``."""
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise TraceError(f"{path} needs pyarrow: pip install 'corun[dev]'") from error
    try:
        table = parquet.read_table(path)
    # A truncated file fails in the footer, a damaged one in a page, each in its own way.
    except Exception as error:
        raise TraceError(f"{path} cannot be read: {_one_line(error)}") from error
    missing = [name for name in names if name not in table.column_names]
    if missing:
        raise TraceError(f"{path} has no column {missing[0]} (it has {table.column_names})")
    if not table.num_rows:
        raise TraceError(f"{path} holds no request")
    return [table[name].to_pylist() for name in names]


def checked_numbers(path: Path, name: str, values: Sequence[float | None]) -> NDArray[np.float64]:
    """As an array. Raises ``TraceError`` if one is missing, not finite or negative."""
    numbers = np.array([np.nan if value is None else value for value in values], dtype=np.float64)
    wrong = np.flatnonzero(~np.isfinite(numbers) | (numbers < 0))
    if len(wrong):
        row = int(wrong[0])
        raise TraceError(f"{path}: the {name} of row {row} is {numbers[row]}")
    return numbers


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _time(text: str) -> datetime:
    """A time stamp like "2023-11-16 18:15:46.6805900": one digit more than Python reads."""
    return datetime.fromisoformat(text[:26]).replace(tzinfo=UTC)


_REQUEST_COLUMNS = ("arrival_s", "prompt_tokens", "output_tokens")
_AZURE_COLUMNS: Mapping[str, Callable[[str], Any]] = {
    "TIMESTAMP": _time,
    "ContextTokens": int,
    "GeneratedTokens": int,
}
_MAX_HASH = 2**24  # they are numbered from 0 on
_MOONCAKE_FIELDS = ("timestamp", "input_length", "output_length", "hash_ids")


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


def _read_jsonl(path: Path, names: Sequence[str]) -> list[list[Any]]:
    """Fields of a file with one object per line, in the order of ``names``."""
    values: list[list[Any]] = [[] for _ in names]
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            try:
                row = json.loads(line)
                for into, name in zip(values, names, strict=True):
                    into.append(row[name])
            except KeyError as error:
                raise TraceError(f"{path}, line {number}: there is no {error}") from error
            except (ValueError, TypeError) as error:
                raise TraceError(f"{path}, line {number}: {_one_line(error)}") from error
    if not values[0]:
        raise TraceError(f"{path} holds no request")
    return values


def _checked_hashes(path: Path, row: int, hashes: object) -> tuple[int, ...]:
    """Of one prompt."""
    if not isinstance(hashes, list) or not hashes:
        raise TraceError(f"{path}: row {row} has no hashes of its prompt's blocks")
    for one in hashes:
        if type(one) is not int or not 0 <= one <= _MAX_HASH:
            raise TraceError(f"{path}: a hash of row {row} is {one!r}, not from 0 to {_MAX_HASH}")
    return tuple(hashes)


def _checked(
    path: Path,
    arrival_s: Sequence[float],
    prompt: Sequence[int],
    output: Sequence[int],
    session: Sequence[int] = (),
) -> RequestTrace:
    # Python's lists, so that a bool or a text in a JSON file does not pass for a number.
    times = checked_numbers(path, "arrival", arrival_s)
    falling = np.flatnonzero(np.diff(times) < 0)
    if len(falling):
        raise TraceError(f"{path}: row {int(falling[0]) + 1} arrives before the one above it")
    return RequestTrace(
        times - times[0],
        checked_numbers(path, "prompt", prompt).astype(np.int64),
        checked_numbers(path, "output", output).astype(np.int64),
        checked_numbers(path, "session", session).astype(np.int64),
    )

"""Traces: public originals and parquet files give the same requests; mistakes are reported."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from corun.runtime.sim.draw_inputs import TraceError, trace_directory
from corun.runtime.sim.papers.tenants import read_maf, read_servegen
from corun.runtime.sim.papers.traces import read_azure, read_gentd26_ids, read_mooncake

_AZURE = "AzureLLMInferenceTrace_conv.csv"
_AZURE_ROWS = (
    "TIMESTAMP,ContextTokens,GeneratedTokens",
    "2023-11-16 18:15:46.6805900,374,44",
    "2023-11-16 18:15:50.9951690,396,109",
    "2023-11-16 18:15:50.9951690,879,55",
)
_MOONCAKE = "conversation_trace.jsonl"
_MOONCAKE_ROWS = (
    {"timestamp": 27000, "input_length": 700, "output_length": 52, "hash_ids": [0, 14]},
    {"timestamp": 30000, "input_length": 100, "output_length": 26, "hash_ids": [7]},
    {"timestamp": 30000, "input_length": 1300, "output_length": 9, "hash_ids": [0, 14, 15]},
)
_HASHED = '{"timestamp": 30000, "input_length": 7, "output_length": 5, "hash_ids": %s}'
_MAF = "invocations_per_function_md.anon.d01.csv"
_MAF_ROWS = ("HashOwner,HashApp,HashFunction,Trigger,1,2,3", "o,a,f,http,0,1,0", "o,a,g,queue,4,0,2")


def write(path: Path, lines: Sequence[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def write_parquet(path: Path, columns: Mapping[str, Any]) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="traces as parquet files need pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pyarrow.table(dict(columns)), path)


def test_azures_trace_is_read_from_the_public_file_and_from_parquet(tmp_path: Path) -> None:
    write(tmp_path / _AZURE, _AZURE_ROWS)
    original = read_azure(tmp_path, "conv")
    assert original.arrival_s == pytest.approx([0.0, 4.314579, 4.314579])
    assert original.prompt_tokens.tolist() == [374, 396, 879]
    assert original.output_tokens.tolist() == [44, 109, 55]
    columns = {
        "arrival_s": [3.0, 7.314579, 7.314579],
        "prompt_tokens": [374, 396, 879],
        "output_tokens": [44, 109, 55],
    }
    write_parquet(tmp_path / "azure2023_code.parquet", columns)
    other = read_azure(tmp_path, "code")
    assert other.arrival_s == pytest.approx(original.arrival_s)
    assert other.prompt_tokens.tolist() == [374, 396, 879]


def test_mooncakes_sessions_are_those_of_the_second_block(tmp_path: Path) -> None:
    write(tmp_path / _MOONCAKE, [json.dumps(row) for row in _MOONCAKE_ROWS])
    trace = read_mooncake(tmp_path)
    assert trace.arrival_s.tolist() == [0.0, 3.0, 3.0]
    assert trace.prompt_tokens.tolist() == [700, 100, 1300]
    assert trace.session.tolist() == [14, 7, 14]
    assert trace.hash_ids == ((0, 14), (7,), (0, 14, 15))
    hashes = [row["hash_ids"] for row in _MOONCAKE_ROWS]
    columns = {
        "arrival_s": [0.0, 3.0, 3.0],
        "prompt_tokens": [700, 100, 1300],
        "output_tokens": [52, 26, 9],
        "hash_ids": hashes,
    }
    write_parquet(tmp_path / "parquet/mooncake_conversation.parquet", columns)
    assert read_mooncake(tmp_path / "parquet").hash_ids == trace.hash_ids


def test_functions_are_ordered_by_their_calls(tmp_path: Path) -> None:
    write(tmp_path / _MAF, _MAF_ROWS)
    calls = read_maf(tmp_path)
    rows = zip(calls.function, calls.minute, calls.count, strict=True)
    assert sorted(rows) == [(0, 0, 4), (0, 2, 2), (1, 1, 1)]


def test_clients_are_read_from_their_chunks(tmp_path: Path) -> None:
    write(tmp_path / "m-small/chunk-0-trace.csv", ("0,1.0,2.5,Gamma,0.16,6.25", "600,0.0,0.0,,,"))
    lengths = {
        "0": {"input_tokens": "{100: 0.5, 50: 0.5}", "output_tokens": "{5: 1.0}"},
        "600": {"input_tokens": "{100: 1.0}", "output_tokens": "{5: 1.0}"},
    }
    write(tmp_path / "m-small/chunk-0-dataset.json", [json.dumps(lengths)])
    (client,) = read_servegen(tmp_path, "m-small")
    windows = (client.window_s, client.rate_rps, client.shape)
    assert [column.tolist() for column in windows] == [[0.0], [1.0], [0.16]]
    assert client.is_gamma.all()
    assert client.prompt_tokens.values.tolist() == [50, 100]
    assert client.prompt_tokens.shares.tolist() == [0.25, 1.0]
    assert client.output_tokens.values.tolist() == [5]


def azure(*changed: tuple[int, str]) -> Callable[[Path], None]:
    """Azure's file with some lines changed."""
    lines = list(_AZURE_ROWS)
    for number, line in changed:
        lines[number] = line
    return lambda directory: write(directory / _AZURE, lines)


def mooncake(line: str) -> Callable[[Path], None]:
    lines = [json.dumps(_MOONCAKE_ROWS[0]), line]
    return lambda directory: write(directory / _MOONCAKE, lines)


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda directory: None, "does not hold the Azure LLM inference trace 2023 \\(conv\\)"),
        (azure((0, "TIMESTAMP,ContextTokens")), "has no column GeneratedTokens"),
        (azure((3, "2023-11-16 18:15:51.0,87")), "line 4: GeneratedTokens is None"),
        (azure((2, "2023-11-16 18:15:50.9,,3")), "line 3: ContextTokens is ''"),
        (azure((1, "2023-11-16 18:15:46.6,nan,44")), "line 2: ContextTokens is 'nan'"),
        (azure((1, "2023-11-16 18:15:46.6,-2,44")), "the prompt of row 0 is -2"),
        (azure((2, "2023-11-16 18:15:41.0,2,44")), "the arrival of row 1 is -5.6"),
        (azure((3, "2023-11-16 18:15:49.0,2,44")), "row 2 arrives before the one above it"),
        (lambda directory: write(directory / _AZURE, _AZURE_ROWS[:1]), "holds no request"),
    ],
)
def test_what_is_wrong_with_a_csv_is_said_in_one_line(
    tmp_path: Path, make: Callable[[Path], None], error: str
) -> None:
    make(tmp_path)
    with pytest.raises(TraceError, match=error) as caught:
        read_azure(tmp_path, "conv")
    assert "\n" not in str(caught.value) and str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (mooncake('{"timestamp": 3, "input_length": 4}'), "line 2: there is no 'output_length'"),
        (mooncake('{"timestamp": 30000, "input_len'), "line 2: "),
        (mooncake("[]"), "line 2: "),
        (mooncake(_HASHED % "[]"), "row 1 has no hashes"),
        (mooncake(_HASHED % '[0, "7"]'), "a hash of row 1 is '7'"),
        (mooncake(_HASHED % "[0, -7]"), "a hash of row 1 is -7"),
        (lambda directory: write(directory / _MOONCAKE, ()), "holds no request"),
    ],
)
def test_what_is_wrong_with_a_jsonl_is_said_in_one_line(
    tmp_path: Path, make: Callable[[Path], None], error: str
) -> None:
    make(tmp_path)
    with pytest.raises(TraceError, match=error) as caught:
        read_mooncake(tmp_path)
    assert "\n" not in str(caught.value)


def test_what_is_wrong_with_a_parquet_file_is_said_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "azure2023_conv.parquet"
    columns: dict[str, list[Any]] = {
        "arrival_s": [0.0, 1.0],
        "prompt_tokens": [3, 4],
        "output_tokens": [5, 6],
    }
    for name, values, error in (
        ("output_tokens", [5, None], "the output of row 1 is nan"),
        ("arrival_s", [float("nan"), 1.0], "the arrival of row 0 is nan"),
        ("arrival_s", [2.0, 1.0], "row 1 arrives before the one above it"),
        ("prompt_tokens", [3, -4], "the prompt of row 1 is -4"),
    ):
        write_parquet(path, columns | {name: values})
        with pytest.raises(TraceError, match=error):
            read_azure(tmp_path, "conv")
    write_parquet(path, {"arrival_s": [0.0], "prompt_tokens": [3]})
    with pytest.raises(TraceError, match="has no column output_tokens"):
        read_azure(tmp_path, "conv")
    write_parquet(path, {name: np.array([], np.int64) for name in columns})
    with pytest.raises(TraceError, match="holds no request"):
        read_azure(tmp_path, "conv")
    write_parquet(path, columns)
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(TraceError, match="cannot be read") as caught:
        read_azure(tmp_path, "conv")
    assert "\n" not in str(caught.value)


def test_lora_ids_leave_out_requests_without_one(tmp_path: Path) -> None:
    path = tmp_path / "gentd26_lora.parquet"
    write_parquet(path, {"lora_ids": [[4, 2], [], [7]]})
    assert read_gentd26_ids(tmp_path).tolist() == [4, 7]
    for ids, error in (([[], []], "names no LoRA"), ([[3], [-1]], "negative LoRA id")):
        write_parquet(path, {"lora_ids": ids})
        with pytest.raises(TraceError, match=error):
            read_gentd26_ids(tmp_path)


@pytest.mark.parametrize(
    ("lines", "error"),
    [
        (("HashOwner,HashApp,HashFunction,Trigger,2", "o,a,f,http,1"), "no columns Trigger and 1"),
        ((*_MAF_ROWS, "o,a,h,http,1"), "line 4 is cut"),
        ((*_MAF_ROWS, "o,a,h,http,1,-1,2"), "line 4 is cut or has a negative count"),
        ((*_MAF_ROWS, "o,a,h,http,1,x,2"), "line 4: "),
        (_MAF_ROWS[:1], "holds no request"),
    ],
)
def test_what_is_wrong_with_counts_is_said(tmp_path: Path, lines: Sequence[str], error: str) -> None:
    write(tmp_path / _MAF, lines)
    with pytest.raises(TraceError, match=error):
        read_maf(tmp_path)


_LENGTHS = json.dumps({"0": {"input_tokens": "{9: 1.0}", "output_tokens": "{5: 1.0}"}})


@pytest.mark.parametrize(
    ("window", "lengths", "error"),
    [
        ("0,1.0,2.5,Gamma", _LENGTHS, "line 1 has 4 fields, not 6"),
        ("0,1.0,2.5,Cauchy,0.16,6.25", _LENGTHS, "gaps that are Cauchy, not Gamma or Weibull"),
        ("0,-1.0,2.5,Gamma,0.16,6.25", _LENGTHS, "the rate of row 0 is -1"),
        ("0,fast,2.5,Gamma,0.16,6.25", _LENGTHS, "could not convert"),
        ("0,0.0,0.0,,,", _LENGTHS, "holds no request"),
        ("0,1.0,2.5,Gamma,0.16,6.25", _LENGTHS[:30], "chunk-0-dataset.json"),
        ("0,1.0,2.5,Gamma,0.16,6.25", '{"0": {"input_tokens": "{9: 1.0}"}}', "no 'output_tokens'"),
        ("0,1.0,2.5,Gamma,0.16,6.25", "{}", "has no input_tokens"),
    ],
)
def test_what_is_wrong_with_clients_is_said(tmp_path: Path, window: str, lengths: str, error: str) -> None:
    write(tmp_path / "m-small/chunk-0-trace.csv", (window,))
    write(tmp_path / "m-small/chunk-0-dataset.json", (lengths,))
    with pytest.raises(TraceError, match=error):
        read_servegen(tmp_path, "m-small")


def test_the_directory_is_named_by_option_or_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CORUN_TRACES", raising=False)
    assert trace_directory() is None
    with pytest.raises(TraceError, match=r"name the directory of .* by --traces or CORUN_TRACES"):
        read_azure(None, "conv")
    monkeypatch.setenv("CORUN_TRACES", "/somewhere")
    assert trace_directory() == Path("/somewhere")
    assert trace_directory("/else") == Path("/else")

"""Logs of requests: their fields, and errors with the number of the line."""

import json
from pathlib import Path
from typing import Any

import pytest
from corun.runtime.sim.draw_inputs import TraceError
from corun.runtime.sim.workload_spec import AdapterSpec, WorkloadSpec
from corun.runtime.sim.workloads import Workload, draw_workload

_LOG = (
    {"arrival_s": 5, "model": "b", "prompt_tokens": 40, "output_tokens": 3, "session": "x"},
    {"arrival_s": 5.5, "model": "a", "prompt_tokens": 33, "output_tokens": 2, "rank": 24},
    {"arrival_s": 9.0, "model": "b", "prompt_tokens": 64, "output_tokens": 1, "session": "x"},
)


def write(directory: Path, *rows: object) -> str:
    path = directory / "log.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return str(path)


def read(path: str, **options: Any) -> Workload:
    return draw_workload(WorkloadSpec(json_lines=path, **options), None)


def test_a_log_is_replayed_as_it_is(tmp_path: Path) -> None:
    workload = read(write(tmp_path, *_LOG), adapters=AdapterSpec(ranks=(16,), number=1))
    assert workload.names == ("a", "b") and workload.ranks == (24, 16)
    rows = [(one.arrival_s, one.adapter, one.prompt_tokens, one.output_tokens) for one in workload.requests]
    assert rows == [(0.0, 1, 40, 3), (0.5, 0, 33, 2), (4.0, 1, 64, 1)]
    first, alone, later = (one.content_ids for one in workload.requests)
    assert (len(first), len(alone), len(later)) == (2, 2, 4)
    assert later[:2] == first and not {*alone} & {*later}
    sessions = [one.session for one in workload.requests]
    assert sessions[0] == sessions[2] != sessions[1]


def test_a_log_without_sessions_shares_nothing(tmp_path: Path) -> None:
    rows = [{key: row[key] for key in row if key != "session"} for row in _LOG]
    workload = read(write(tmp_path, *rows))
    assert all(one.session is None and not one.content_ids for one in workload.requests)


def test_its_clock_is_scaled_and_it_is_cut(tmp_path: Path) -> None:
    path = write(tmp_path, *_LOG)
    assert [one.arrival_s for one in read(path, rps=1.0).requests] == [0.0, 0.25, 2.0]
    assert len(read(path, requests=2).requests) == 2
    assert len(read(path, duration_s=0.5).requests) == 1
    assert len(read(path, duration_s=3.0).requests) == 2


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ([], "is no object with arrival_s, model, prompt_tokens, output_tokens"),
        ({**_LOG[1], "model": None}, "has no model"),
        ({**_LOG[1], "model": ""}, "model is '', must be the name of an adapter"),
        ({**_LOG[1], "arrival_s": -1}, "arrival_s is -1, must be seconds from 0 on"),
        ({**_LOG[1], "arrival_s": True}, "arrival_s is True, must be seconds"),
        ({**_LOG[1], "arrival_s": float("nan")}, "arrival_s is nan, must be seconds"),
        ({**_LOG[1], "prompt_tokens": 0}, "prompt_tokens is 0, must be a whole number from 1 on"),
        ({**_LOG[1], "output_tokens": 1.5}, "output_tokens is 1.5, must be a whole number"),
        ({**_LOG[1], "rank": "8"}, "rank is '8', must be a whole number"),
        ({**_LOG[1], "session": [1]}, r"session is \[1\], must be text or a number"),
        ({**_LOG[1], "sessions": "x"}, "unknown field 'sessions'; did you mean 'session'"),
        ({**_LOG[1], "arrival_s": 4.0}, "arrives before the one above it"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, row: object, reason: str) -> None:
    with pytest.raises(TraceError, match=rf"log\.jsonl, line 2:? {reason}"):
        read(write(tmp_path, _LOG[0], row))


def test_a_file_that_is_none_or_empty_or_contradicts_itself_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="No such file"):
        read(str(tmp_path / "missing.jsonl"))
    with pytest.raises(TraceError, match="holds no request"):
        read(write(tmp_path))
    (tmp_path / "cut.jsonl").write_text(json.dumps(_LOG[0]) + '\n{"arrival_s"')
    with pytest.raises(TraceError, match="line 2 is no JSON: "):
        read(str(tmp_path / "cut.jsonl"))
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(TraceError, match="line 1 is no JSON: "):
        read(str(tmp_path / "binary.jsonl"))
    (tmp_path / "deep.jsonl").write_text("[" * 10**6)
    with pytest.raises(TraceError, match="line 1 is no JSON: "):
        read(str(tmp_path / "deep.jsonl"))
    with pytest.raises(TraceError, match="a has rank 24 and rank 8"):
        read(write(tmp_path, _LOG[1], {**_LOG[1], "rank": 8}))
    with pytest.raises(TraceError, match="all requests of the trace's part arrive at once"):
        read(write(tmp_path, _LOG[0], _LOG[0]), rps=2.0)

"""Verdicts and stored results of the benchmark beside competing processes."""

import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from load import Job
from neighbours.cells import Kept, in_turn, rows_of
from neighbours.competitors import quota, spinning
from neighbours.servers import Window, peer_fields
from neighbours.verdicts import share_of, verdicts


def row(tokens_per_s: float, gap_ms: float = 10.0, rounds: int = 3) -> dict[str, list[float]]:
    values = {"tokens_per_s": tokens_per_s, "gap_p50_ms": gap_ms, "gap_p95_ms": gap_ms}
    return {name: [value] * rounds for name, value in values.items()}


def judged(**cells: dict[str, Any]) -> Iterator[bool | None]:
    named = {name.replace("__", "/"): cell for name, cell in cells.items()}
    return iter(verdicts({name: {"disturbed": []} | cell for name, cell in named.items()}).values())


def test_share() -> None:
    assert [share_of(per_core) for per_core in (0, 1, 2)] == [1, 1 / 2, 1 / 3]


@pytest.mark.parametrize(
    ("clients", "rate", "again", "expected"),
    [
        (1, 120.0, 120.0, True),
        (1, 119.0, 119.0, False),
        (8, 105.0, 105.0, True),
        (8, 104.0, 104.0, False),
        (16, 107.0, 107.0, True),
        (16, 106.0, 106.0, False),
    ],
)
def test_speed_over_another_tree(clients: int, rate: float, again: float, *, expected: bool) -> None:
    cell = {"auto": row(rate), "against": row(100.0), "auto again": row(again)}
    assert [*judged(**{f"speed/int8/{clients}": cell})] == [expected]
    noisy = row(again) | {"tokens_per_s": [again, again * 1.1, again * 1.2]}
    assert [*judged(**{f"speed/int8/{clients}": cell | {"auto again": noisy}})] == [None]
    del cell["against"]
    assert [*judged(**{f"speed/int8/{clients}": cell})] == []


@pytest.mark.parametrize(
    ("read_gb_per_s", "gap_ms", "expected"),
    [(40.0, 11.4, True), (40.0, 11.6, False), (50.0, 10.7, True), (50.0, 10.9, False)],
)
def test_a_step_over_reading(read_gb_per_s: float, gap_ms: float, *, expected: bool) -> None:
    rows = [(read_gb_per_s, gap_ms, read_gb_per_s)] * 3
    weight_bytes = 400e6  # 10 ms at 40 GB/s, 8 at 50
    cell = {"weight_bytes": weight_bytes, "read_gap_read": rows}
    assert [*judged(reading__bfloat16=cell)] == [expected]


@pytest.mark.parametrize(
    ("per_core", "rate", "gap_ms", "expected"),
    [
        (1, 30.0, 80.0, [True, True, True]),
        (1, 29.9, 80.1, [True, False, False]),
        (2, 20.1, 119.0, [True, True, True]),
        (2, 17.0, 121.0, [False, False, False]),
    ],
)
def test_beside_competitors(per_core: int, rate: float, gap_ms: float, expected: list[bool]) -> None:
    """Against the better of the threads that are given, and against share and quiet rate."""
    best = 33.0 if per_core == 1 else 22.0
    fixed = {"threads 1": row(best), "threads 2": row(3.0)}
    quiet = {"auto": row(100.0, 10.0), "threads 1": row(60.0), "threads 2": row(100.0)}
    found = judged(
        busy__int4__0__8=quiet, **{f"busy__int4__{per_core}__8": {"auto": row(rate, gap_ms), **fixed}}
    )
    assert [*found] == expected


def test_beside_a_quota_only_threads_count() -> None:
    cell = {"auto": row(90.0), "threads 1": row(80.0), "threads 2": row(100.0)}
    quiet = {"auto": row(1000.0), "threads 1": row(1.0), "threads 2": row(1.0)}
    assert [*judged(busy__int4__0__8=quiet, busy__int4__quota__8=cell)] == [True]
    assert [*judged(busy__int4__quota__8=cell | {"threads 2": row(101.0)})] == [False]


def test_a_peer_is_to_be_reached_in_every_cell() -> None:
    cell = {"auto": row(90.0), "threads 1": row(80.0), "peer": row(90.0)}
    assert [*judged(busy__int4__0__8=cell)] == [True]
    assert [*judged(busy__int4__0__8=cell | {"peer": row(91.0)})] == [False]
    assert [*judged(busy__int4__0__8=cell | {"peer": row(0.0)})] == [True]


@pytest.mark.parametrize(
    ("after", "expected"),
    [
        ([(5.0, 60.0), (40.0, 95.0), (90.0, 50.0)], True),
        ([(5.0, 60.0), (61.0, 95.0)], False),
        ([(5.0, 94.0)], False),
    ],
)
def test_quiet_again(after: list[tuple[float, float]], *, expected: bool) -> None:
    assert [*judged(again__int8={"before": [99.0, 100.0, 105.0], "after": after})] == [expected]


def test_every_start_under_load_has_to_come_to_the_quiet_speed() -> None:
    def start(rate: float) -> dict[str, Any]:
        pair = {"quiet": row(110.0), "started under load": row(rate)}
        return {"1": pair, "8": pair | {"started under load": row(110.0)}}

    assert [*judged(start__int8__0=start(101.0), start__int8__1=start(120.0))] == [True, True]
    assert [*judged(start__int8__0=start(101.0), start__int8__1=start(99.0))] == [False, True]


@pytest.mark.parametrize(
    ("gap_ms", "bounds_ms", "rate", "expected"),
    [
        (250.0, [200.0, 250.0, 900.0], 97.0, [True, True]),
        (251.0, [200.0, 250.0, 900.0], 96.0, [False, False]),
        (1.0, [], 97.0, [None, True]),
    ],
)
def test_gaps_beside_long_prompts(
    gap_ms: float, bounds_ms: list[float], rate: float, expected: list[bool | None]
) -> None:
    cell = {"auto": {**row(rate, gap_ms), "bound_ms": bounds_ms}, "unbounded": row(100.0, 2e3)}
    assert [*judged(gaps__bfloat16=cell)] == expected


def test_a_disturbed_cell_says_nothing() -> None:
    cell = {"before": [1.0], "after": [(5.0, 1.0)], "disturbed": ["others"]}
    assert [*judged(again__int8=cell)] == [None]


def test_cells_are_kept_and_measured_again_where_they_were_disturbed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, of, num_measured = tmp_path / "kept.json", {"commit": "a"}, 0

    def measure() -> dict[str, Any]:
        nonlocal num_measured
        num_measured += 1
        return {"value": num_measured}

    reasons: tuple[str, ...] = ("others",)
    monkeypatch.setattr("neighbours.cells.busy_reasons", lambda *_: reasons)
    assert Kept(path, of).cell("a", measure)["value"] == 1
    reasons = ()
    assert [Kept(path, of).cell("a", measure)["value"] for _ in range(2)] == [2, 2]
    with pytest.raises(SystemExit, match="name another --results"):
        Kept(path, {"commit": "b"})


def test_turns_and_rows() -> None:
    order: list[str] = []
    found = in_turn({name: partial(order.append, name) for name in "abc"}, 2)
    assert "".join(order) == "abccba"
    assert {name: len(values) for name, values in found.items()} == {"a": 2, "b": 2, "c": 2}
    windows = [Window(1.0, 2.0, 3.0), Window(4.0, 5.0, 6.0)]
    assert rows_of({"a": windows})["a"]["gap_p95_ms"] == [3.0, 6.0]
    assert Window.of([], 1.0).gap_p50_ms == float("inf")


def test_competitors_spin_as_long_as_they_are_to() -> None:
    def children() -> set[int]:
        return {child.pid for child in psutil.Process().children()}

    before = children()
    with spinning(1):
        started = children() - before
        assert len(started) == len(psutil.Process().cpu_affinity() or ())
    assert not children() & started


def test_a_quota_is_of_what_is_run_in_its_group() -> None:
    try:
        with quota(1.5) as prefix:
            command = [*prefix, "cat", "/proc/self/cgroup"]
            groups = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except OSError as error:
        pytest.skip(f"no such group can be made: {error}")
    assert "corun-bench-" in groups


def test_requests_to_a_peer_name_adapters_by_number() -> None:
    fields_of = peer_fields('{"lora": [{"id": ADAPTER, "scale": 1}]}', ["a", "b"])
    assert fields_of(Job([], "b", 1)) == {"lora": [{"id": 1, "scale": 1}]}

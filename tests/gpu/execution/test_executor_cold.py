"""Cold and warm rows in one pass: the executor runs it once, and reports the failing rows."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from corun.gpu.coexec.assistant import ColdRow
from corun.runtime.plan import Outcome, RequestId, RetryCause, SubBatch, SubBatchKind, WorkersChanged
from corun.shm.errors import RowsFullError
from support.architectures import save_model
from support.executor_device import ADAPTER, Arriving, ExecutorDevice, blocks, load, new, rows, wait_progress


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model("llama3-rope", tmp_path_factory.mktemp("model"))


@pytest.fixture
def device(directory: Path) -> Iterator[ExecutorDevice]:
    device = ExecutorDevice(directory)
    yield device
    device.executor.close()
    device.loaded.close()


def cold_rows(*columns: tuple[int, int, int, bool, int]) -> SubBatch:
    ids, starts, counts, samples, splits = zip(*columns, strict=True)
    request_ids = tuple(RequestId(i) for i in ids)
    return SubBatch(SubBatchKind.ASSISTED, request_ids, starts, counts, samples, splits)


OF_WORKERS = SimpleNamespace(of_head=None)  # deltas


class Assisting:
    """Replaces the workers: they fail, or return void results."""

    def __init__(self, error: Exception | None = None, void: Sequence[tuple[int, int]] = ()) -> None:
        self.error = error
        self.void = void
        self.num_given_up = 0

    def begin(self, rows: list[ColdRow], where: torch.device) -> Any:
        if self.error is not None and any(row.split_layer for row in rows):
            raise self.error
        return SimpleNamespace(deltas=OF_WORKERS, finish=lambda: frozenset(self.void), abandon=self.abandon)

    def abandon(self) -> None:
        self.num_given_up += 1


def beside_the_cold_one(
    device: ExecutorDevice, monkeypatch: pytest.MonkeyPatch, assisting: Assisting, *, is_broken: bool
) -> tuple[Any, list[Any]]:
    """A pass of a warm row that decodes, a warm chunk and a cold chunk.

    Returns the rows' results by request, and those of the warm ones computed without the cold one.
    """
    forward = device.runner.forward
    deltas_of_passes: list[Any] = []

    def with_workers(inputs: Any, deltas: Any, *_: Any) -> Any:
        deltas_of_passes.append(deltas)
        if deltas is not None and is_broken:
            forward(inputs)  # all is written; the next thing fails
            raise RuntimeError("the exchange is broken")
        return forward(inputs)

    device.assistant = assisting
    device.adapter = Arriving(device.make_adapter())
    device.submit(transfers=(load(1),))
    wait_progress(device)
    requests = (new(1, (5, 6)), new(2, (7, 8, 9)), new(3, (5, 6), ADAPTER))
    tables = (blocks(1, 0), blocks(2, 1), blocks(3, 2))
    device.run(rows((1, 0, 2, True)), new_requests=requests, block_updates=tables)
    (alone,) = device.run(rows((1, 2, 1, True), (2, 0, 3, True)))
    monkeypatch.setattr(device.runner, "forward", with_workers)
    (result,) = device.run(cold_rows((1, 2, 1, True, 0), (2, 0, 3, True, 0), (3, 0, 2, True, 1)))
    assert deltas_of_passes == ([] if assisting.error else [OF_WORKERS])  # and nothing else
    return {row.request_id: row for row in result.rows}, list(alone.rows)


def causes_of(found: dict[RequestId, Any]) -> list[RetryCause | None]:
    """Why the three rows must be computed again."""
    rows = [found[RequestId(number)] for number in (1, 2, 3)]
    assert {row.outcome for row in rows} == {Outcome.RETRY}
    return [row.cause for row in rows]


def test_a_pass_that_workers_cannot_take_is_the_fault_of_the_rows_that_need_them(
    device: ExecutorDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    assisting = Assisting(error=RowsFullError("too many tokens"))
    found, _ = beside_the_cold_one(device, monkeypatch, assisting, is_broken=False)
    assert causes_of(found) == [RetryCause.OTHER_ROW, RetryCause.OTHER_ROW, RetryCause.DELTAS]
    assert "too many tokens" in (found[RequestId(3)].error or "")


def test_void_deltas_are_the_cold_rows_matter_alone(
    device: ExecutorDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, alone = beside_the_cold_one(device, monkeypatch, Assisting(void=[(4, 6)]), is_broken=False)
    assert [found[RequestId(1)], found[RequestId(2)]] == alone
    assert found[RequestId(3)].outcome is Outcome.RETRY
    assert found[RequestId(3)].cause is RetryCause.DELTAS


def test_what_breaks_a_pass_with_cold_rows_is_not_the_fault_of_the_warm_ones(
    device: ExecutorDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    assisting = Assisting()
    found, alone = beside_the_cold_one(device, monkeypatch, assisting, is_broken=True)
    assert causes_of(found) == [RetryCause.OTHER_ROW, RetryCause.OTHER_ROW, RetryCause.FORWARD]
    assert "the exchange is broken" in (found[RequestId(3)].error or "")
    assert assisting.num_given_up == 1
    (again,) = device.run(rows((1, 2, 1, True), (2, 0, 3, True)))
    assert list(again.rows) == alone


def test_it_is_told_once_how_many_workers_are_ready(device: ExecutorDevice) -> None:
    device.workers.num_ready_workers = 1
    assert device.executor.poll() == [WorkersChanged(1)]
    assert device.executor.poll() == []
    device.workers.num_ready_workers = 0
    assert device.executor.poll() == [WorkersChanged(0)]
    device.workers.num_ready_workers = 2
    assert device.executor.poll() == [WorkersChanged(2)]
    assert device.executor.poll() == []


def test_a_cold_row_whose_adapter_does_not_move_yet_is_retried(device: ExecutorDevice) -> None:
    (result,) = device.run(
        cold_rows((1, 0, 2, True, 0)), new_requests=(new(1, (5, 6), ADAPTER),), block_updates=(blocks(1, 0),)
    )
    assert [row.outcome for row in result.rows] == [Outcome.RETRY]
    assert [row.cause for row in result.rows] == [RetryCause.DELTAS]
    assert "load of the adapter has not begun" in (result.rows[0].error or "")

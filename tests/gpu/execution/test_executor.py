"""The device executor: results per row, isolated failures, returned memory."""

import gc
import os
import resource
import select
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from corun.gpu.kv.host import HostKv
from corun.gpu.lora.table import DeviceAdapter
from corun.profiles.link import Direction
from corun.runtime.errors import AdapterError, EngineDeadError, ResourceError
from corun.runtime.plan import (
    BlockId,
    HostMove,
    HostPlaceId,
    HostSlot,
    KvTransfer,
    Outcome,
    RequestId,
    RetryCause,
    StepId,
    StepResult,
    TransferId,
    TransferResult,
)
from corun.shm.errors import ShmError
from support.architectures import save_model
from support.cuda.errors import accelerator_error
from support.executor_device import ADAPTER, ExecutorDevice, blocks, load, new, rows, wait_transfer


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model("llama3-rope", tmp_path_factory.mktemp("model"))


@pytest.fixture
def device(directory: Path) -> Iterator[ExecutorDevice]:
    device = ExecutorDevice(directory)
    yield device
    device.executor.close()
    device.loaded.close()


def test_rows_that_do_not_sample_have_no_result(device: ExecutorDevice) -> None:
    (result,) = device.run(
        rows((1, 0, 3, False), (2, 0, 2, True)),
        new_requests=(new(1, (5, 6, 7, 8, 9)), new(2, (5, 6))),
        block_updates=(blocks(1, 3, 7), blocks(2, 1)),
    )
    assert [row.request_id for row in result.rows] == [2]
    assert result.rows[0].outcome is Outcome.TOKENS
    (result,) = device.run(rows((1, 3, 2, False)))
    assert result.rows == ()


def test_chunks_and_other_blocks_do_not_change_the_tokens(device: ExecutorDevice) -> None:
    prompt = (5, 6, 7, 8, 9, 10)
    (whole,) = device.run(
        rows((1, 0, 6, True)), new_requests=(new(1, prompt),), block_updates=(blocks(1, 0, 1),)
    )
    device.run(rows((2, 0, 1, False)), new_requests=(new(2, prompt),), block_updates=(blocks(2, 9),))
    (chunked,) = device.run(rows((2, 1, 5, True)), block_updates=(blocks(2, 4, first=1),))
    assert whole.rows[0].token_ids == chunked.rows[0].token_ids
    # Preempted: other blocks, computed again with the sampled token, then one further.
    (again,) = device.run(rows((2, 0, 7, True)), block_updates=(blocks(2, 20, 22),))
    (straight,) = device.run(rows((1, 6, 1, True)))
    assert again.rows[0].token_ids == straight.rows[0].token_ids


def test_blocks_that_were_on_the_host_give_the_same_tokens(device: ExecutorDevice) -> None:
    def move(number: int, direction: Direction, *pairs: tuple[int, int]) -> KvTransfer:
        blocks, slots = zip(*pairs, strict=True)
        return KvTransfer(
            TransferId(number), direction, tuple(map(BlockId, blocks)), tuple(map(HostSlot, slots))
        )

    prompt = (5, 6, 7, 8, 9, 10, 11, 12)
    device.run(rows((1, 0, 8, True)), new_requests=(new(1, prompt),), block_updates=(blocks(1, 0, 1, 2),))
    (straight,) = device.run(rows((1, 8, 1, True)))
    device.submit(transfers=(move(1, Direction.TO_HOST, (0, 5), (1, 3)),))
    assert wait_transfer(device) == TransferResult(TransferId(1))
    device.run(
        rows((2, 0, 8, False)),
        new_requests=(new(2, (9, 9, 9, 9, 9, 9, 9, 9)),),
        block_updates=(blocks(2, 0, 1),),
    )
    prefetch = replace(move(2, Direction.TO_DEVICE, (6, 5), (4, 3)), is_demand=False)
    device.submit(transfers=(prefetch,), promoted_transfers=(TransferId(2),))
    assert wait_transfer(device) == TransferResult(TransferId(2))
    (again,) = device.run(rows((1, 8, 1, True)), block_updates=(blocks(1, 6, 4, 7),))
    assert again.rows == straight.rows
    assert device.executor.is_idle


def test_a_row_computed_again_replaces_its_token(device: ExecutorDevice) -> None:
    (first,) = device.run(
        rows((1, 0, 2, True)), new_requests=(new(1, (5, 6)),), block_updates=(blocks(1, 0),)
    )
    (second,) = device.run(rows((1, 2, 1, True)))
    (again,) = device.run(rows((1, 0, 2, True)))
    assert again == StepResult(StepId(3), first.rows)
    assert device.run(rows((1, 2, 1, True)))[0].rows == second.rows


def test_is_readable_while_there_are_results(device: ExecutorDevice) -> None:
    assert not select.select([device.executor], [], [], 0)[0]
    device.submit(ended_requests=(RequestId(9),))
    assert select.select([device.executor], [], [], 0)[0]
    assert len(device.executor.poll()) == 1
    assert not select.select([device.executor], [], [], 0)[0]
    assert device.executor.poll() == []


def test_waits_on_a_descriptor_with_a_large_number(directory: Path) -> None:
    """As in a server with many connections; select() takes 1023 at most."""
    gc.collect()  # files of earlier tests that go meanwhile would leave low numbers free
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(2048, hard), hard))
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        device = ExecutorDevice(directory)
        assert device.executor.fileno() > 1023
        device.submit(transfers=(load(1),))
        assert wait_transfer(device).error is not None
        device.executor.close()
        device.loaded.close()
    finally:
        for file in files:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_plan_without_rows_has_a_result(device: ExecutorDevice) -> None:
    assert device.run(ended_requests=(RequestId(9),)) == [StepResult(StepId(1), ())]


def test_an_exception_voids_its_sub_batch_alone(
    device: ExecutorDevice, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    forward = device.runner.forward

    def broken(inputs: Any, *others: Any) -> Any:
        if inputs.attention.max_query_len > 1:
            raise MemoryError("no room")
        return forward(inputs, *others)

    monkeypatch.setattr(device.runner, "forward", broken)
    (result,) = device.run(
        rows((1, 0, 1, True)),
        rows((2, 0, 3, False), (3, 0, 2, True)),
        new_requests=(new(1, (5,)), new(2, (5, 6, 7, 8)), new(3, (5, 6))),
        block_updates=(blocks(1, 0), blocks(2, 1), blocks(3, 2)),
    )
    by_request = {row.request_id: row for row in result.rows}
    assert by_request[RequestId(1)].outcome is Outcome.TOKENS
    for request_id in (2, 3):
        row = by_request[RequestId(request_id)]
        assert (row.outcome, row.cause) == (Outcome.RETRY, RetryCause.FORWARD)
        assert "MemoryError: no room" in (row.error or "")
    assert "sub-batch of 2 rows failed" in caplog.text
    assert device.run(rows((1, 1, 1, True)))[0].rows[0].outcome is Outcome.TOKENS


def test_rows_that_lack_memory_are_not_to_blame(
    device: ExecutorDevice, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A sub-batch of one token cannot get smaller, so its row may be the cause."""
    forward = device.runner.forward

    def full(inputs: Any, *others: Any) -> Any:
        if len(inputs.input_ids.view(-1)) > num_tokens:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(inputs, *others)

    monkeypatch.setattr(device.runner, "forward", full)
    num_tokens = 2
    batch = rows((1, 0, 1, True), (2, 0, 2, True))
    (result,) = device.run(
        batch, new_requests=(new(1, (5,)), new(2, (5, 6))), block_updates=(blocks(1, 0), blocks(2, 1))
    )
    assert [row.cause for row in result.rows] == [RetryCause.MEMORY] * 2
    assert "sub-batch" not in caplog.text  # the scheduler has one line for it
    assert device.run(rows((2, 0, 2, True)))[0].rows[0].outcome is Outcome.TOKENS
    num_tokens = 0
    assert device.run(rows((1, 0, 1, True)))[0].rows[0].cause is RetryCause.FORWARD


def test_a_lost_device_is_the_engines_end(device: ExecutorDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(inputs: Any, *others: Any) -> Any:
        raise accelerator_error(700)

    monkeypatch.setattr(device.runner, "forward", broken)
    with pytest.raises(EngineDeadError, match="an illegal address"):
        device.run(rows((1, 0, 1, True)), new_requests=(new(1, (5,)),), block_updates=(blocks(1, 0),))


def test_a_lost_device_takes_no_adapter(device: ExecutorDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(adapter: object) -> int:
        raise accelerator_error(214)

    device.adapter = device.make_adapter()
    monkeypatch.setattr(device.loaded.lora_table, "add", broken)
    device.submit(transfers=(load(1),))
    with pytest.raises(EngineDeadError, match="ECC"):
        wait_transfer(device)


def test_logits_that_are_not_finite_fail_their_row_alone(device: ExecutorDevice) -> None:
    device.adapter = device.make_adapter()
    next(iter(device.adapter.targets.values())).b.fill_(float("inf"))
    device.submit(transfers=(load(1),))
    assert wait_transfer(device) == TransferResult(TransferId(1))
    (result,) = device.run(
        rows((1, 0, 2, True), (2, 0, 2, True)),
        new_requests=(new(1, (5, 6)), new(2, (5, 6), ADAPTER)),
        block_updates=(blocks(1, 0), blocks(2, 1)),
    )
    assert [row.outcome for row in result.rows] == [Outcome.TOKENS, Outcome.FAILED]
    assert "not finite" in (result.rows[1].error or "")


def test_an_adapter_serves_after_its_load_and_not_after_its_eviction(device: ExecutorDevice) -> None:
    device.adapter = device.make_adapter()
    device.submit(transfers=(load(1),))
    assert select.select([device.executor], [], [], 10)[0]
    assert wait_transfer(device) == TransferResult(TransferId(1))
    requests = (new(1, (5, 6)), new(2, (5, 6), ADAPTER))
    (result,) = device.run(
        rows((1, 0, 2, True), (2, 0, 2, True)),
        new_requests=requests,
        block_updates=(blocks(1, 0), blocks(2, 1)),
    )
    base, adapted = (row.token_ids for row in result.rows)
    assert base != adapted
    device.run(evict_adapters=(ADAPTER,))
    assert device.loaded.lora_table.num_free_rows == device.loaded.lora_table.capacity
    (result,) = device.run(rows((1, 2, 1, True), (2, 2, 1, True)))
    outcomes = [(row.outcome, row.cause) for row in result.rows]
    assert outcomes == [(Outcome.RETRY, RetryCause.OTHER_ROW), (Outcome.RETRY, RetryCause.FORWARD)]


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (AdapterError("its files have changed"), "AdapterFailedError"),
        (ZeroDivisionError("x"), "AdapterUnavailableError"),
    ],
)
def test_a_load_that_fails_says_why(device: ExecutorDevice, error: Exception, kind: str) -> None:
    device.adapter = error
    device.submit(transfers=(load(1),))
    result = wait_transfer(device)
    assert str(error) in (result.error or "") and result.error_kind == kind
    device.adapter = device.make_adapter()
    device.submit(transfers=(load(2),))
    assert wait_transfer(device) == TransferResult(TransferId(2))


def test_the_host_evicts_before_loads_begin(device: ExecutorDevice) -> None:
    device.adapter = device.make_adapter()
    device.submit(transfers=(load(1),), host_evictions=(HostPlaceId(3), HostPlaceId(4)))
    assert wait_transfer(device) == TransferResult(TransferId(1))
    assert device.host_log == ["evict (3, 4)", "fetch 1"]


def note_kv_sections(device: ExecutorDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    log = device.host_log
    monkeypatch.setattr(HostKv, "take_section", lambda _, section: log.append(f"KV: take {section}"))
    monkeypatch.setattr(HostKv, "give_section", lambda _, section: log.append(f"KV: give {section}"))


def test_memory_of_the_host_moves_after_evictions_and_before_loads(
    device: ExecutorDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    note_kv_sections(device, monkeypatch)
    device.adapter = device.make_adapter()
    to_kv = HostMove(TransferId(2), to_kv=True, source=5, target=1)
    device.submit(transfers=(load(1),), host_evictions=(HostPlaceId(3),), host_move=to_kv)
    ended: list[TransferResult] = []
    while len(ended) < 2:
        results = device.executor.poll(10.0) or pytest.fail("no result")
        ended += [one for one in results if isinstance(one, TransferResult)]
    assert {one.transfer_id: one.error for one in ended} == {1: None, 2: None}
    assert device.host_log == ["evict (3,)", "KV: take 1", "give 5", "fetch 1"]
    device.submit(host_move=to_kv)
    assert wait_transfer(device) == TransferResult(TransferId(2)), "it is repeated, not moved again"
    back = HostMove(TransferId(3), to_kv=False, source=0, target=5)
    device.submit(host_move=back)
    assert wait_transfer(device) == TransferResult(TransferId(3))
    assert device.host_log[4:] == ["take 5", "KV: give 0"]


def test_a_section_that_is_still_read_stays_with_its_side(
    device: ExecutorDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    note_kv_sections(device, monkeypatch)
    device.refusal = ShmError("a worker reads it")
    device.submit(host_move=HostMove(TransferId(1), to_kv=True, source=0, target=1))
    assert wait_transfer(device) == TransferResult(TransferId(1), "a worker reads it")
    assert device.host_log == ["KV: take 1", "KV: give 1"]


def test_an_adapter_without_a_row_gives_its_memory_back(
    device: ExecutorDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    released: list[bool] = []
    device.adapter = DeviceAdapter({}, release=lambda: released.append(True))

    def full(adapter: object) -> int:
        raise ResourceError("the LoRA table is full")

    monkeypatch.setattr(device.loaded.lora_table, "add", full)
    device.submit(transfers=(load(1),))
    assert "table is full" in (wait_transfer(device).error or "")
    assert released == [True]


def test_requests_are_forgotten_and_slots_reused(device: ExecutorDevice) -> None:
    for request_id in range(1, 60):
        (result,) = device.run(
            rows((request_id, 0, 2, True)),
            new_requests=(new(request_id, (5, 6)),),
            block_updates=(blocks(request_id, 0),),
            ended_requests=(RequestId(request_id - 1),),
        )
        assert isinstance(result, StepResult)
        assert result.rows[0].outcome is Outcome.TOKENS


def test_memory_of_free_blocks_goes_back_before_an_adapter_comes(
    device: ExecutorDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    device.run(
        rows((1, 0, 8, True), (2, 0, 4, True)),
        new_requests=(new(1, (5,) * 8), new(2, (6,) * 4)),
        block_updates=(blocks(1, 0, 1), blocks(2, 2)),
    )
    key, _ = device.runner.pool.layer(0)
    assert all(bool(key[block].any()) for block in (0, 1, 2))
    log = device.host_log
    monkeypatch.setattr(device.runner.pool, "release", lambda ids: log.append(f"release {ids}"))
    device.submit(ended_requests=(RequestId(1),), freed_blocks=(BlockId(0), BlockId(1)), transfers=(load(1),))
    wait_transfer(device)
    assert log == ["release (0, 1)", "fetch 1"]


def test_close_twice(device: ExecutorDevice) -> None:
    device.executor.close()
    device.executor.close()

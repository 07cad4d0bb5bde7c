"""Copies to the device in one piece, on a device that is the CPU with memory of its own."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from corun.gpu.execution.request_table import RequestTable
from corun.gpu.forward.lower import ForwardInputs, PackedRows, lower
from corun.gpu.forward.upload import Mirror, upload
from corun.gpu.lora.base import PackedLora
from corun.gpu.lora.table import DeviceAdapter, LoraTable
from corun.runtime.plan import BASE_ADAPTER, BlockId, BlockUpdate, NewRequest, RequestId
from corun.runtime.sampling import SamplingParams
from numpy.typing import NDArray
from torch.overrides import TorchFunctionMode

CUDA, CPU = torch.device("cuda"), torch.device("cpu")
BLOCK_SIZE = 4


class OtherMemory(TorchFunctionMode):
    """``to`` copies also if both devices are the CPU, and pinned memory is usual memory."""

    def __init__(self) -> None:
        super().__init__()
        self.num_copies = self.num_bytes = 0
        self.fails = False

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        named = dict(kwargs or {})
        named.pop("pin_memory", None)
        if func is torch.Tensor.to and args[1:] == (CUDA,):
            if self.fails:
                raise torch.OutOfMemoryError("no memory")
            self.num_copies += 1
            self.num_bytes += args[0].nbytes
            return args[0].clone()
        return func(*args, **named)


@pytest.fixture
def device() -> Iterator[OtherMemory]:
    with OtherMemory() as mode:
        yield mode


def test_arrays_of_all_kinds_arrive_in_one_copy(device: OtherMemory) -> None:
    rng = np.random.default_rng(0)
    arrays: dict[str, NDArray[Any]] = {
        "bytes": rng.integers(0, 2**31, 3).astype(np.int32),
        "none": np.empty(0, dtype=np.int64),
        "pairs": rng.standard_normal((5, 2)),
        "flags": np.array([True, False, True]),
        "columns": np.arange(12, dtype=np.int64).reshape(3, 4).T,  # with gaps
        "floats": rng.standard_normal((3, 1)).astype(np.float32),
    }
    sent = upload(arrays, CUDA)
    assert device.num_copies == 1
    for name, array in arrays.items():
        assert torch.equal(sent[name], torch.from_numpy(array)), name
        assert sent[name].dtype == torch.from_numpy(array).dtype
        assert array.size == 0 or sent[name].data_ptr() % 16 == 0
    assert upload({}, CUDA) == {} and device.num_copies == 1


def test_a_mirror_has_what_changed_with_the_next_upload(device: OtherMemory) -> None:
    rng = np.random.default_rng(1)
    hosts: list[NDArray[Any]] = [np.zeros((9, 2), dtype=np.int64), np.zeros(9, dtype=np.float32)]
    mirror = Mirror(hosts, CUDA)
    addresses = [tensor.data_ptr() for tensor in mirror.tensors]
    for _ in range(20):
        rows = rng.integers(0, 9, int(rng.integers(0, 5)))
        for host in hosts:
            host[rows] = rng.integers(1, 99, host[rows].shape)
        mirror.mark(rows.tolist())
        assert mirror.is_current == (len(rows) == 0)
        device.num_copies = 0
        sent = upload({"one": np.arange(3)}, CUDA, [mirror])
        assert sent["one"].tolist() == [0, 1, 2] and device.num_copies == 1
        for host, tensor in zip(hosts, mirror.tensors, strict=True):
            assert np.array_equal(tensor.numpy(), host)
    assert [tensor.data_ptr() for tensor in mirror.tensors] == addresses


def test_an_upload_that_fails_loses_no_change(device: OtherMemory) -> None:
    host = np.zeros(3, dtype=np.int32)
    mirror = Mirror([host], CUDA)
    host[1] = 5
    mirror.mark((1,))
    device.fails = True
    with pytest.raises(torch.OutOfMemoryError):
        upload({}, CUDA, [mirror])
    device.fails = False
    upload({}, CUDA, [mirror])
    assert mirror.tensors[0].tolist() == [0, 5, 0]


def test_the_table_of_adapters_is_that_of_the_host(device: OtherMemory) -> None:
    table = LoraTable(num_targets=3, capacity=2, device=CUDA)
    packed = PackedLora(torch.ones(4, 6), torch.ones(5, 4), 4, 0.5)
    first = table.add(DeviceAdapter({1: packed}))
    assert table.ranks[first].tolist() == [0, 0, 0]
    table.upload()
    assert table.ranks[first].tolist() == [0, 4, 0]
    assert table.a_pointers[first, 1].item() == packed.a.data_ptr()
    assert table.scalings[first].tolist() == [0.0, 0.5, 0.0]
    table.remove(first)
    second = table.add(DeviceAdapter({0: packed, 2: packed}))
    table.upload()
    assert table.ranks[first].tolist() == ([4, 0, 4] if second == first else [0, 0, 0])
    assert table.ranks[second].tolist() == [4, 0, 4]


def lowered(
    table: RequestTable,
    device: torch.device,
    ids: Sequence[int],
    *,
    block_size: int = BLOCK_SIZE,
    start: int | None = None,
) -> ForwardInputs:
    """One token of each request; ``start``: its position, None = that of its last token."""
    states = [table[RequestId(i)] for i in ids]
    starts = np.array([state.num_tokens - 1 if start is None else start for state in states])
    rows = PackedRows(
        token_ids=np.arange(len(ids)),
        starts=starts,
        num_tokens=np.ones(len(ids), dtype=np.int64),
        block_tables=table.block_tables,
        slots=np.array([state.slot for state in states]),
        known_lens=tuple(state.num_tokens for state in states),
        table_rows=tuple(i % 3 - 1 for i in ids),
        ranks=tuple(4 * (i % 3) for i in ids),
        logit_indices=np.arange(0, len(ids), 2),
    )
    return lower(rows, block_size, device)


def test_a_step_copies_what_changed_in_long_contexts(device: OtherMemory) -> None:
    """256 rows of 32,768 tokens in blocks of 16, of which 16 get another block."""
    table = RequestTable(32_768, 16, CUDA)
    ids = range(256)
    table.add([NewRequest(RequestId(i), (1,), SamplingParams(), BASE_ADAPTER) for i in ids])
    table.update_blocks([BlockUpdate(RequestId(i), 0, (BlockId(i),) * 2047) for i in ids])
    lowered(table, CUDA, ids, block_size=16, start=32_751)
    table.update_blocks([BlockUpdate(RequestId(i), 2047, (BlockId(i),)) for i in range(16)])
    device.num_copies = device.num_bytes = 0
    inputs = lowered(table, CUDA, ids, block_size=16, start=32_752)
    assert inputs.attention.block_tables.shape == (256, 2048)
    assert device.num_copies == 1
    assert device.num_bytes <= 64 * 1024


def test_passes_read_the_blocks_that_plans_gave(device: OtherMemory) -> None:
    """Requests come, grow, are replaced and end; more than there were slots for."""
    rng = np.random.default_rng(2)
    tables = [RequestTable(64, BLOCK_SIZE, place) for place in (CUDA, CPU)]
    alive: list[int] = []
    for step in range(40):
        new = NewRequest(RequestId(step), (1,) * int(rng.integers(1, 65)), SamplingParams(), BASE_ADAPTER)
        ended = [i for i in alive if rng.random() < 0.02]
        alive = [*(i for i in alive if i not in ended), step]
        again = [step, *(i for i in alive if rng.random() < 0.2)]
        updates = [
            BlockUpdate(RequestId(i), 0, tuple(BlockId(int(b)) for b in rng.integers(1, 999, 16)))
            for i in again
        ]
        for table in tables:
            table.remove([RequestId(i) for i in ended])
            table.add([new])
            table.update_blocks(updates)
        if step % 3:
            continue
        chosen = [i for i in alive if rng.random() < 0.7] or alive
        device.num_copies = 0
        there, here = (
            lowered(table, place, chosen) for table, place in zip(tables, (CUDA, CPU), strict=True)
        )
        assert device.num_copies == 1
        for name in ("query_starts", "context_lens", "block_tables", "slot_mapping"):
            assert torch.equal(getattr(there.attention, name), getattr(here.attention, name)), name
        for name in ("input_ids", "position_ids", "logit_indices"):
            assert torch.equal(getattr(there, name), getattr(here, name)), name
        if there.lora is not None and here.lora is not None:
            assert torch.equal(there.lora.table_rows, here.lora.table_rows)
            assert torch.equal(there.lora.segment_ends, here.lora.segment_ends)
    assert len(alive) > 16

"""Deltas of cold rows on the CPU: against the plain product, with threads for workers."""

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from corun.cpu_workers.kernels.lora.handover import add_rows
from corun.gpu.coexec.cold_deltas import Arrival, ColdDeltas, ColdPlan
from corun.gpu.coexec.handover import Exchange
from corun.gpu.coexec.host_handover import HostHandover
from corun.gpu.coexec.invocation import Invocation, job_shape
from corun.gpu.device.base import Word
from corun.gpu.device.cpu import CpuDevice
from corun.gpu.lora.table import DeviceAdapter, LoraTable
from corun.gpu.lora.torch_backend import TorchLora
from corun.runtime.errors import ModelError
from corun.shm.atomics import spin_until, store_release
from corun.shm.region import TargetSize, plan_region
from support.lora import make_batch

WIDTH, OUT, RANK, TOKENS = 32, (48, 16), 4, 12
NUM_LAYERS = 3
DEADLINE_NS = 20_000_000_000
SHAPE = job_shape(plan_region(WIDTH, 2, [TargetSize(RANK, width, 1.0, 64, 64) for width in OUT]))


class ThreadWorker:
    """Waits for x, computes a stand-in for the deltas, and signals y."""

    def __init__(self) -> None:
        self.words = np.zeros(64, np.int32)  # ready, done, and those that a sender reads, a line each
        self.x = torch.zeros(TOKENS, WIDTH, dtype=torch.bfloat16)
        self.y = torch.zeros(TOKENS, sum(OUT), dtype=torch.bfloat16)
        self.matrix = torch.randn(WIDTH, sum(OUT), dtype=torch.bfloat16)
        self.address = 0  # of the rows: offsets are addresses here
        self.order: list[int] = []
        self.jobs: list[tuple[int, int]] = []  # sequence, tokens
        self.takes_s = 0.0
        self.thread = threading.Thread(target=self.run, daemon=True)

    @property
    def ready(self) -> Word:
        return Word("ready", self.words.ctypes.data)

    @property
    def done(self) -> Word:
        return Word("done", self.words.ctypes.data + 64)

    def run(self) -> None:
        for sequence, num_tokens in self.jobs:
            assert spin_until(self.ready.host_address, sequence, DEADLINE_NS)
            time.sleep(self.takes_s)
            self.y[:num_tokens] = self.x[:num_tokens] @ self.matrix
            self.order.append(sequence)
            store_release(self.done.host_address, sequence)

    def invocation(self, sequence: int, start: int, end: int) -> Invocation:
        self.jobs.append((sequence, end - start))
        return Invocation(
            (0, 0),
            sequence,
            start,
            end,
            SHAPE,
            self,
            self.x.data_ptr(),
            self.y.data_ptr(),
            self.ready,
            self.done,
        )

    def rows(self, offset: int, num_rows: int, num_columns: int) -> torch.Tensor:
        raise AssertionError("addresses are enough")


@dataclass
class Bench:
    """A device with a compute stream, one resident adapter, and a worker."""

    device: CpuDevice
    exchange: Exchange
    backend: TorchLora
    table: LoraTable
    row: int
    worker: ThreadWorker


@pytest.fixture
def bench() -> Iterator[Bench]:
    device = CpuDevice()
    compute = device.stream("compute")
    table = LoraTable(2, 2, "cpu")
    backend = TorchLora(table, dtype=torch.bfloat16)
    torch.manual_seed(0)
    targets = {
        index: backend.pack(torch.randn(RANK, WIDTH), torch.randn(width, RANK), 0.5)
        for index, width in enumerate(OUT)
    }
    row = table.add(DeviceAdapter(targets))
    yield Bench(device, Exchange(device, compute, compute), backend, table, row, ThreadWorker())
    device.close(timeout_s=1.0)


def zeros(num_tokens: int) -> list[torch.Tensor]:
    return [torch.zeros(num_tokens, width, dtype=torch.bfloat16) for width in OUT]


def run_pass(bench: Bench, plan: ColdPlan, x: torch.Tensor) -> list[list[torch.Tensor]]:
    """All layers, base products of zero; on the compute stream, as an executor would."""
    deltas = ColdDeltas(HostHandover(bench.exchange), bench.backend, plan)
    results: list[list[torch.Tensor]] = []

    def compute() -> None:
        for layer in range(NUM_LAYERS):
            deltas.begin((layer, 0), x)
            ys = zeros(len(x))
            deltas.add((layer, 0), x, ys, [0, 1])
            results.append(ys)

    bench.worker.thread.start()
    bench.device.launch(bench.exchange.compute, compute)
    bench.device.synchronize(timeout_s=20.0)
    return results


def expected_device(bench: Bench, x: torch.Tensor, start: int, end: int) -> list[torch.Tensor]:
    ys = zeros(len(x))
    batch = make_batch([(start, end, 0)], bench.table, [bench.row])
    bench.backend.add_deltas(x, ys, [0, 1], batch)
    return ys


def test_groups_that_are_called_in_another_order_are_refused(bench: Bench) -> None:
    x = torch.randn(TOKENS, WIDTH, dtype=torch.bfloat16)
    first, second = (bench.worker.invocation(number, 0, TOKENS) for number in (1, 2))
    plan = ColdPlan({(0, 0): (first,), (0, 1): (second,)}, (None,), ((),))
    for keys in ([(0, 1), (0, 0)], [(0, 0), (0, 0)]):
        deltas = ColdDeltas(HostHandover(bench.exchange), bench.backend, plan)
        deltas.begin(keys[0], x)
        with pytest.raises(ModelError, match="calls input group"):
            deltas.begin(keys[1], x)


def test_workers_below_the_split_and_the_device_from_it_on(bench: Bench) -> None:
    x = torch.randn(TOKENS, WIDTH, dtype=torch.bfloat16)
    start, end, split = 3, 9, 2
    worker = bench.worker
    invocations = {(layer, 0): (worker.invocation(layer + 1, start, end),) for layer in range(split)}
    batch = make_batch([(start, end, 0)], bench.table, [bench.row])
    event = bench.device.event()
    load = bench.exchange.compute
    bench.device.record(load, event)
    plan = ColdPlan(invocations, (None, None, batch), ((), (), (Arrival(event, (x,)),)))
    layers = run_pass(bench, plan, x)
    by_worker = x[start:end] @ worker.matrix
    for layer in range(split):
        wide = torch.cat(layers[layer], dim=1)
        torch.testing.assert_close(wide[start:end], by_worker)
        assert not wide[:start].any() and not wide[end:].any()
    for got, want in zip(layers[split], expected_device(bench, x, start, end), strict=True):
        assert torch.equal(got, want)
    assert worker.order == [1, 2]


def test_a_wait_for_longer_than_one_stays_awake(bench: Bench) -> None:
    x = torch.randn(TOKENS, WIDTH, dtype=torch.bfloat16)
    bench.worker.takes_s = 0.03
    plan = ColdPlan({(1, 0): (bench.worker.invocation(1, 0, TOKENS),)}, (None,) * 3, ((),) * 3)
    results = run_pass(bench, plan, x)
    torch.testing.assert_close(torch.cat(results[1], dim=1), x @ bench.worker.matrix)
    assert not torch.cat(results[0] + results[2], dim=1).any()


def test_jobs_of_one_group_meet_again(bench: Bench) -> None:
    x = torch.randn(TOKENS, WIDTH, dtype=torch.bfloat16)
    left, right = bench.worker, ThreadWorker()
    right.matrix = left.matrix
    invocations = {
        (layer, 0): (left.invocation(layer + 1, 0, 8), right.invocation(layer + 1, 8, TOKENS))
        for layer in range(NUM_LAYERS)
    }
    plan = ColdPlan(invocations, (None,) * NUM_LAYERS, ((),) * NUM_LAYERS)
    right.thread.start()
    for ys in run_pass(bench, plan, x):
        torch.testing.assert_close(torch.cat(ys, dim=1), x @ left.matrix)


def test_sums_are_rounded_as_torch_rounds_them() -> None:
    """Of any two bfloat16, in rows of any width and stride, without touching other rows."""
    bits = np.random.default_rng(0).integers(0, 2**16, (2, 64, 1003), dtype=np.uint16)
    sums, terms = (torch.from_numpy(half).view(torch.bfloat16) for half in bits)
    expected = sums.clone()
    expected[3:60, 5:990] += terms[3:60, 5:990]
    stride, first = sums.stride(0) * 2, (3 * sums.stride(0) + 5) * 2
    add_rows(sums.data_ptr() + first, stride, terms.data_ptr() + first, stride, 57, 985)
    numbers = ~expected.isnan()
    assert torch.equal(sums.isnan(), ~numbers)
    assert torch.equal(sums[numbers].view(torch.int16), expected[numbers].view(torch.int16))

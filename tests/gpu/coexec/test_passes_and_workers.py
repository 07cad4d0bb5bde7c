"""Passes with a team of two real workers that are abandoned, refused, interrupted and killed leave nothing.

No pass uses a result, an x or a y of another one.
"""

import random
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from corun.cpu_workers.teams import JobModel, TeamJob
from corun.gpu.coexec.assistant import Assistant, AssistedPass, ColdRow
from corun.gpu.coexec.cold_deltas import Arrival
from corun.gpu.coexec.gateway import AssistedRow, PlacedGroup, WorkerGateway
from corun.gpu.coexec.handover import Exchange
from corun.gpu.coexec.host_handover import HostHandover
from corun.gpu.coexec.invocation import job_shape
from corun.gpu.device.cpu import CpuDevice
from corun.shm.errors import RowsFullError, WaitTimeoutError, WorkerUnavailableError
from corun.shm.job import Job
from corun.shm.layout import LINE_BYTES
from support.deltas import POISON, floats
from support.streams.symbolic_tensors import as_torch
from support.worker_pool import IN_FEATURES, OUT_FEATURES, Driver, case, make_config, table_of, workers

NUM_LAYERS = 3
MAX_TOKENS = 32
FIRST_SEQUENCE = 2**31 - 40  # numbers wrap around on the way


@dataclass(frozen=True)
class Cold:
    """An adapter that is only in the arena: by layer, with the driver's places."""

    driver: Driver
    places: tuple[int, ...]

    @property
    def groups(self) -> list[PlacedGroup]:
        offsets, places = self.driver.offsets, self.driver.places
        return [
            PlacedGroup((layer, 0), offsets[place], job_shape(places[place].region))
            for layer, place in enumerate(self.places)
        ]

    def begin_pass(self) -> int:
        return len(self.places)

    def await_read(self, layer: int) -> None:
        raise AssertionError("all layers are on the host")

    def arrival(self, layer: int) -> Arrival | None:
        raise AssertionError("all layers are the workers'")

    def has_failed(self) -> bool:
        return False

    def expected(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        """The deltas of all targets side by side, float64."""
        place = self.driver.places[self.places[layer]]
        columns = []
        for matrices, scaling in zip(place.matrices, place.scalings, strict=True):
            assert matrices is not None
            a, b = torch.from_numpy(floats(matrices.a)), torch.from_numpy(floats(matrices.b))
            columns.append(x.double() @ a.T @ b.T * scaling)
        return torch.cat(columns, dim=1)


class Passes:
    """An executor's work with an assistant, and two adapters."""

    def __init__(self, driver: Driver, device: CpuDevice) -> None:
        self.driver, self.device = driver, device
        compute = device.stream("compute")
        device.adopt(compute)
        pool = driver.pool
        self.rows = device.register(pool.rows.segment.buffer, name="rows", is_paced=False)
        self.control = device.register(pool.control.segment.buffer, name="ctl", is_paced=False)
        self.exchange = Exchange(device, compute, compute)
        gateway = self.gateway()
        self.assistant = Assistant(HostHandover(self.exchange), as_torch(None), gateway, NUM_LAYERS)
        self.adapters = [Cold(driver, (0, 1, 2)), Cold(driver, (3, 4, 5))]

    def gateway(self, **options: bool) -> WorkerGateway:
        pool, model = self.driver.pool, JobModel(s_per_product=1e-4)
        return WorkerGateway(pool, self.rows, self.control, self.exchange, model, [1.0], **options)

    @property
    def num_outstanding(self) -> int:
        return self.driver.pool.end.num_outstanding

    def begin(self, num_tokens: int, adapter: int) -> AssistedPass:
        if not self.num_outstanding:
            self._poison()
        row = ColdRow(0, num_tokens, NUM_LAYERS, 0, 8, self.adapters[adapter])
        return self.assistant.begin([row], torch.device("cpu"))

    def run(self, num_tokens: int, adapter: int, at_layer: Callable[[int], None] | None = None) -> bool:
        """One pass; returns whether its deltas count, and checks them if so."""
        assisted = self.begin(num_tokens, adapter)
        results = []
        try:
            for layer in range(NUM_LAYERS):
                x = torch.randn(num_tokens, IN_FEATURES, dtype=torch.bfloat16)
                ys = [torch.zeros(num_tokens, width, dtype=torch.bfloat16) for width in OUT_FEATURES]
                assisted.deltas.begin((layer, 0), x)
                if at_layer is not None:
                    at_layer(layer)
                assisted.deltas.add((layer, 0), x, ys, [0, 1])
                results.append((x, torch.cat(ys, dim=1)))
        except ArithmeticError:
            assisted.abandon()
            return False
        if assisted.finish():
            return False
        for layer, (x, y) in enumerate(results):
            expected = self.adapters[adapter].expected(layer, x)
            torch.testing.assert_close(y.double(), expected, rtol=0.05, atol=0.5)
        return True

    def close(self) -> None:
        self.rows.close()
        self.control.close()

    def _poison(self) -> None:
        """Data of earlier passes must not pass for a result."""
        segment = self.driver.pool.rows.segment
        count = (segment.num_bytes - LINE_BYTES) // 2
        segment.view(np.uint16, LINE_BYTES, count)[:] = POISON


@pytest.fixture(scope="module")
def passes() -> Iterator[Passes]:
    table = table_of("numba")
    config = make_config(2, delta_table=table, first_sequence=FIRST_SEQUENCE, max_tokens=MAX_TOKENS)
    device = CpuDevice()
    with Driver([case(seed=seed) for seed in range(2 * NUM_LAYERS)], config) as driver:
        passes = Passes(driver, device)
        yield passes
        passes.assistant = as_torch(None)
        passes.close()
        device.close()


def fail(layer: int) -> Callable[[int], None]:
    def at_layer(now: int) -> None:
        if now == layer:
            raise ArithmeticError

    return at_layer


def break_off_publishing(passes: Passes, rng: random.Random) -> None:
    """The pool raises midway: earlier jobs are published, and their x is never sent."""
    pool, number = passes.driver.pool, rng.randrange(4)
    submit = pool.submit

    def broken(tasks: Sequence[TeamJob]) -> list[Job]:
        if number:
            submit(tasks[:number])
        raise WorkerUnavailableError("it went just now")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool, "submit", broken)
        with pytest.raises(WorkerUnavailableError, match="just now"):
            passes.begin(rng.randint(9, MAX_TOKENS), rng.randrange(2))
    assert not passes.num_outstanding


def lose_results(passes: Passes, rng: random.Random) -> None:
    """They are not taken in time: the pass is void, and the next one is not affected."""

    def late(*_: object, **__: object) -> None:
        raise WaitTimeoutError("it took too long")

    with pytest.MonkeyPatch.context() as patch:

        def be_late(layer: int) -> None:
            patch.setattr(passes.driver.pool, "wait_done", late)

        assert not passes.run(rng.randint(1, MAX_TOKENS), 0, be_late)
    assert passes.num_outstanding


def refuse(passes: Passes, rng: random.Random) -> None:
    before = passes.driver.pool.end.next_sequence
    with pytest.raises(RowsFullError, match=r"a pass has 33 tokens .* and their memory has room for 32"):
        passes.begin(MAX_TOKENS + 1, 0)
    assert passes.driver.pool.end.next_sequence == before


def abandon(passes: Passes, rng: random.Random) -> None:
    layer = rng.randrange(NUM_LAYERS)
    assert not passes.run(rng.randint(1, MAX_TOKENS), rng.randrange(2), fail(layer))
    assert not passes.num_outstanding


def succeed(passes: Passes, rng: random.Random) -> None:
    assert passes.run(rng.randint(1, MAX_TOKENS), rng.randrange(2))
    assert not passes.num_outstanding


FAULTS = [break_off_publishing, lose_results, refuse, abandon]


@pytest.mark.parametrize("seed", range(3))
def test_faults_in_any_order_leave_nothing_to_the_next_pass(passes: Passes, seed: int) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    for _ in range(15):
        rng.choice(FAULTS)(passes, rng)
        if rng.random() < 0.7:
            succeed(passes, rng)
    succeed(passes, rng)


@pytest.mark.parametrize("shares_cores", [False, True])
def test_workers_nap_while_files_are_read_on_their_cores(
    passes: Passes, monkeypatch: pytest.MonkeyPatch, shares_cores: bool
) -> None:
    gateway, pool = passes.gateway(shares_cores=shares_cores), passes.driver.pool
    crowded: list[set[bool]] = []

    def refuse(tasks: Sequence[TeamJob]) -> list[Job]:
        crowded.append({task.is_crowded for task in tasks})
        raise WorkerUnavailableError("it is not needed")

    monkeypatch.setattr(pool, "submit", refuse)
    for is_reading in (False, True):
        with pytest.raises(WorkerUnavailableError, match="not needed"):
            gateway.invoke([AssistedRow(0, 4, NUM_LAYERS, passes.adapters[0])], is_reading=is_reading)
    assert crowded == [{False}, {shares_cores}]


@pytest.mark.parametrize("gives_up", [False, True])
def test_a_worker_that_is_killed_in_a_pass(passes: Passes, gives_up: bool) -> None:
    """Its pass is void and others are not; nothing waits for it any more."""
    rng = random.Random(0)

    def kill(layer: int) -> None:
        if layer == 1:
            workers()[0].send_signal(signal.SIGKILL)
            if gives_up:
                raise ArithmeticError

    assert not passes.run(MAX_TOKENS, 0, kill)
    assert not passes.num_outstanding
    passes.driver.wait_ready()
    for _ in range(5):
        succeed(passes, rng)

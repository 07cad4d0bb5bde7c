"""Cold requests for adapters that are first read from files, layer by layer."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from corun.gpu.adapters.store import HostAdapter
from corun.gpu.coexec.invocation import Invocation
from corun.runtime.coldstart.strategy import LoadStrategy
from corun.runtime.errors import AdapterFailedError
from corun.runtime.memory.adapter_cache import AdapterState
from corun.runtime.plan import StepPlan, SubBatchKind
from corun.runtime.request import Request
from corun.runtime.scheduler.cold import ColdChunk
from support.cold_engine import Answer, ColdEngine
from support.cold_parity import NUM_LAYERS, check, make_case, prompts
from support.gated_files import FileGate
from support.parity import ParityCase
from support.peft_adapters import WEIGHTS, edit_tensors
from support.worker_pool import workers

NAME = "attention"  # q, k, v, o of every layer
TENSORS_OF_A_LAYER = 8


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> ParityCase:
    return make_case(tmp_path_factory.mktemp("deep"))


class Files:
    """An engine, and the files of one of its adapters."""

    def __init__(self, engine: ColdEngine, gate: FileGate, path: Path, original: Path) -> None:
        self.engine = engine
        self.path = path
        self.original = original
        self.gate = gate

    def forget(self) -> None:
        """Remove it from the device and the arena."""
        self.engine.cool(NAME)
        self.engine.empty_host()
        assert self.engine.arena.taken_bytes == 0
        np.frombuffer(self.engine.arena.segment.buffer, np.uint8).fill(0xFF)  # NaN, and no header

    @contextmanager
    def read_when_awaited(self, on_x: Callable[[int], None] = lambda layer: None) -> Iterator[list[int]]:
        """Have only the first layer read, and each other one when a pass waits for it.

        Yields the number of tensors that were read when the workers got x of each layer. ``on_x`` is
        called with each of these layers.
        """
        gate, read_at_x, wait_whole = self.gate, list[int](), HostAdapter.wait_whole
        num_before = gate.num_taken

        def let_and_wait(host: HostAdapter, num_regions: int, timeout_s: float) -> bool:
            if host.num_whole < num_regions:
                gate.let(TENSORS_OF_A_LAYER)
            return wait_whole(host, num_regions, timeout_s)

        def sent(invocation: Invocation) -> None:
            layer = invocation.key[0]
            if layer == len(read_at_x):
                read_at_x.append(gate.num_taken - num_before)
                on_x(layer)

        gate.close()
        gate.let(TENSORS_OF_A_LAYER)
        with mock.patch.object(HostAdapter, "wait_whole", let_and_wait), self.engine.watched_sends(sent):
            yield read_at_x

    def first_layer_is_there(self) -> bool:
        return self.engine.num_groups_arrived(NAME) >= 1


@pytest.fixture(scope="module")
def running(case: ParityCase, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Files]:
    path = tmp_path_factory.mktemp("files") / NAME
    shutil.copytree(case.adapters[NAME], path)
    gate = FileGate()
    with (
        gate.before_files(),
        ColdEngine(
            case.directory, {NAME: path}, tmp_path_factory.mktemp("engine"), delta_backend="numpy"
        ) as engine,
    ):
        yield Files(engine, gate, path, case.adapters[NAME])


@pytest.fixture
def files(running: Files, monkeypatch: pytest.MonkeyPatch) -> Iterator[Files]:
    """Nothing is in memory; afterwards everything is released."""
    monkeypatch.setattr("corun.gpu.adapters.arrival._READ_TIMEOUT_S", 30.0)
    running.forget()
    running.engine.plans.clear()
    yield running
    running.gate.open()
    shutil.copy(running.original / WEIGHTS, running.path / WEIGHTS)
    running.engine.check_nothing_is_held()
    running.forget()


def start_early(files: Files, split_layer: int) -> Any:
    """Start when the first layer is on the device, with as many as possible for the workers."""

    def chunk(request: Request, max_tokens: int) -> ColdChunk | None:
        if not files.first_layer_is_there():
            return None
        return ColdChunk(max_tokens, 0 if request.retried_positions else split_layer)

    return files.engine.chunks(chunk)


@pytest.mark.parametrize("split_layer", [0, NUM_LAYERS])
def test_a_prefill_begins_before_the_second_layer_is_read(
    files: Files, case: ParityCase, split_layer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, taken_at_start = files.engine, []
    executor, num_taken = engine.parts.executor, files.gate.num_taken
    submit = executor.submit

    def let_the_rest(plan: StepPlan) -> None:
        if any(batch.kind is SubBatchKind.ASSISTED for batch in plan.sub_batches):
            taken_at_start.append(files.gate.num_taken - num_taken)
            files.gate.open()
        submit(plan)

    monkeypatch.setattr(executor, "submit", let_the_rest)
    num_retried = engine.core.stats().num_retried_rows
    files.gate.close()
    files.gate.let(TENSORS_OF_A_LAYER)
    with start_early(files, split_layer):
        engine.ask(NAME, prompts(1, seed=20)[0])
        answers = engine.run()
    assert taken_at_start[0] == TENSORS_OF_A_LAYER
    assert engine.core.stats().num_retried_rows == num_retried
    check(case, answers)


def test_a_late_layer_that_has_changed_fails_the_request_and_nothing_else(
    files: Files, case: ParityCase
) -> None:
    engine = files.engine
    last = f"layers__{NUM_LAYERS - 1}__self_attn__o_proj__lora_B"
    edit_tensors(files.path, **{last: lambda tensor: tensor + 1})
    prompt = prompts(1, seed=21)[0]
    with start_early(files, 0):
        other = engine.ask(None, prompt)
        asked = engine.ask(NAME, prompt)
        engine.run_until(lambda: bool(asked.finish_reason and other.finish_reason))
    assert asked.error is not None
    assert "have changed since the adapter was registered" in asked.error
    engine.run()
    check(case, [other])
    assert engine.arena.taken_bytes == 0
    shutil.copy(files.original / WEIGHTS, files.path / WEIGHTS)
    engine.ask(NAME, prompt)
    check(case, engine.run())


def test_a_layer_that_is_late_costs_a_retry_and_not_the_request(
    files: Files, case: ParityCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No row of the pass waits for a disk that hangs."""
    engine = files.engine
    monkeypatch.setattr("corun.gpu.adapters.arrival._READ_TIMEOUT_S", 0.001)
    prompt = prompts(1, seed=22)[0]
    files.gate.close()
    files.gate.let(TENSORS_OF_A_LAYER)
    with start_early(files, NUM_LAYERS):
        asked = engine.ask(NAME, prompt)
        engine.run_until(lambda: engine.core.stats().num_retried_rows >= 2)
        assert not asked.token_ids
        other = engine.ask(None, prompt)
        engine.run_until(lambda: other.finish_reason is not None)
        assert not asked.token_ids
        files.gate.open()
        answers = engine.run()
    check(case, answers)


@pytest.mark.parametrize("is_unloaded", [False, True])
def test_nobody_waits_any_more_while_it_is_read(files: Files, case: ParityCase, is_unloaded: bool) -> None:
    engine = files.engine
    files.gate.close()
    files.gate.let(TENSORS_OF_A_LAYER)
    prompt = prompts(1, seed=23)[0]
    with engine.chunks(lambda request, max_tokens: None):
        asked = engine.ask(NAME, prompt)
        engine.run_until(files.first_layer_is_there)
        if is_unloaded:
            engine.unregister(NAME)
        engine.abort(asked)
        engine.run_until(lambda: asked.finish_reason == "abort")
        files.gate.open()
        engine.run()
    if is_unloaded:
        assert engine.arena.taken_bytes == 0
        engine.register(NAME, files.path)
    engine.ask(NAME, prompt)
    check(case, engine.run())


@pytest.mark.parametrize("strategy", [LoadStrategy.PIPELINED, LoadStrategy.ASSISTED, None])
def test_the_planner_starts_it_as_it_is_read(
    files: Files, case: ParityCase, strategy: LoadStrategy | None
) -> None:
    engine = files.engine
    engine.use_strategy(strategy)
    answers: list[Answer] = []
    for seed in range(2):
        files.forget()
        engine.ask(NAME, prompts(1, seed=30 + seed)[0])
        answers += engine.run()
    assert engine.assisted, "every request waited for the whole adapter"
    assert all(answer.finish_reason == "length" for answer in answers)
    check(case, answers)


# Adapters with values that nothing has read before the request's load does.
FIRST = "first"


@pytest.fixture
def first(files: Files, tmp_path: Path) -> Iterator[Path]:
    """A folder of the same content; ``FIRST`` is removed afterwards."""
    yield Path(shutil.copytree(files.original, tmp_path / FIRST))
    files.gate.open()
    files.engine.run()
    files.engine.unregister(FIRST)
    host = files.engine.scheduler.memory.host
    assert host is not None
    table, arena = files.engine.parts.loaded.lora_table, files.engine.arena
    files.engine.run_until(lambda: table.num_free_rows == table.capacity)
    files.engine.run_until(lambda: arena.place_ids == host.place_ids)


def check_first(case: ParityCase, answers: list[Answer]) -> None:
    """As adapter ``NAME``, whose content it has."""
    check(case, [replace(one, adapter=NAME if one.adapter == FIRST else one.adapter) for one in answers])


def workers_at_once(files: Files, name: str) -> Any:
    """Start when the first layer is on the device, with workers in all layers; without them again."""

    def chunk(request: Request, max_tokens: int) -> ColdChunk | None:
        if not files.engine.num_groups_arrived(name):
            return None
        if request.retried_positions:
            files.gate.open()
        return ColdChunk(max_tokens, 0 if request.retried_positions else NUM_LAYERS)

    return files.engine.chunks(chunk)


READ_IN_TIME = [TENSORS_OF_A_LAYER * (layer + 1) for layer in range(NUM_LAYERS)]


@pytest.mark.parametrize("is_first", [False, True])
def test_workers_get_layers_that_are_read_after_the_pass_began(
    files: Files, case: ParityCase, is_first: bool, request: pytest.FixtureRequest
) -> None:
    if is_first:
        files.engine.register_unread(FIRST, request.getfixturevalue("first"))
    engine, name = files.engine, FIRST if is_first else NAME
    num_retried = engine.core.stats().num_retried_rows
    with workers_at_once(files, name), files.read_when_awaited() as read_at_x:
        engine.ask(name, prompts(1, seed=60)[0])
        answers = engine.run()
    assert read_at_x == READ_IN_TIME
    assert engine.core.stats().num_retried_rows == num_retried
    check_first(case, answers)


@pytest.mark.parametrize("split_layer", [0, NUM_LAYERS])
def test_a_first_use_begins_before_the_second_layer_is_read(
    files: Files, first: Path, case: ParityCase, split_layer: int
) -> None:
    engine, num_taken = files.engine, files.gate.num_taken
    engine.register_unread(FIRST, first)
    assert files.gate.num_taken == num_taken, "only its header has been read"
    files.gate.close()
    files.gate.let(TENSORS_OF_A_LAYER)
    read_at_start: list[int] = []

    def chunk(request: Request, max_tokens: int) -> ColdChunk | None:
        if not engine.num_groups_arrived(FIRST):
            return None
        read_at_start.append(files.gate.num_taken - num_taken)
        files.gate.open()
        return ColdChunk(max_tokens, 0 if request.retried_positions else split_layer)

    with engine.chunks(chunk):
        engine.ask(FIRST, prompts(1, seed=50)[0])
        answers = engine.run()
    assert read_at_start[0] == TENSORS_OF_A_LAYER
    assert engine.assisted
    check_first(case, answers)
    engine.assembly.adapters.poll()
    of_content = engine.assembly.adapters.resolve(NAME).digest
    assert engine.assembly.adapters.resolve(FIRST).content == of_content
    engine.cool(FIRST)
    engine.empty_host()
    engine.ask(FIRST, prompts(1, seed=51)[0])  # and is verified against what was read
    check_first(case, engine.run())


@pytest.mark.parametrize("is_cut", [False, True])
def test_a_first_use_of_files_that_are_damaged_half_way(
    files: Files, first: Path, case: ParityCase, is_cut: bool
) -> None:
    """The request gets the fault's name, later ones at once, and nothing of it stays."""
    engine, adapters = files.engine, files.engine.assembly.adapters
    last = f"layers__{NUM_LAYERS - 1}__self_attn__o_proj__lora_B"
    if not is_cut:
        edit_tensors(first, **{last: lambda tensor: torch.full_like(tensor, torch.nan)})
    engine.register_unread(FIRST, first)
    reason = "changed while it was read" if is_cut else "not finite"

    def cut(layer: int) -> None:
        if is_cut and layer == 0:
            (first / WEIGHTS).write_bytes((first / WEIGHTS).read_bytes()[:-2])

    with workers_at_once(files, FIRST), files.read_when_awaited(cut) as read_at_x:
        asked = engine.ask(FIRST, prompts(1, seed=52)[0])
        engine.run_until(lambda: asked.finish_reason is not None)
        other = engine.ask(None, prompts(1, seed=53)[0])
        engine.run()
    assert read_at_x[: NUM_LAYERS - 1] == READ_IN_TIME[:-1], "the pass began before"
    assert asked.finish_reason == "error" and not asked.token_ids
    assert asked.error is not None and reason in asked.error
    check(case, [other])
    adapters.poll()
    with pytest.raises(AdapterFailedError, match=reason):
        engine.ask(FIRST, prompts(1, seed=52)[0])
    assert engine.arena.taken_bytes == 0
    shutil.copy(files.original / WEIGHTS, first / WEIGHTS)
    engine.register(FIRST, first)
    engine.ask(FIRST, prompts(1, seed=52)[0])
    check_first(case, engine.run())


def test_a_worker_that_dies_during_a_first_use(files: Files, first: Path, case: ParityCase) -> None:
    """It dies while the pass waits for the next layer to be read."""
    engine, killed = files.engine, list[int]()
    engine.wait_workers()
    engine.register_unread(FIRST, first)

    def kill(layer: int) -> None:
        if layer == 1:
            for process in workers():
                process.kill()
                killed.append(process.pid)

    with workers_at_once(files, FIRST), files.read_when_awaited(kill):
        engine.ask(FIRST, prompts(1, seed=54)[0])
        answers = engine.run()
    assert killed
    check_first(case, answers)
    engine.wait_workers()


def test_a_first_use_that_ends_before_its_files_are_read(files: Files, first: Path, case: ParityCase) -> None:
    engine = files.engine
    engine.register_unread(FIRST, first)
    files.gate.close()
    files.gate.let(TENSORS_OF_A_LAYER)
    with engine.chunks(lambda request, max_tokens: None):
        asked = engine.ask(FIRST, prompts(1, seed=55)[0])
        engine.run_until(lambda: engine.num_groups_arrived(FIRST) >= 1)
        engine.abort(asked)
        engine.run_until(lambda: asked.finish_reason == "abort")
        files.gate.open()
        engine.run()
    engine.cool(FIRST)
    engine.empty_host()
    assert engine.arena.taken_bytes == 0
    engine.ask(FIRST, prompts(1, seed=55)[0])
    check_first(case, engine.run())


def test_bytes_are_those_that_were_registered(files: Files) -> None:
    """The bytes on the device equal those in the arena at registration."""
    engine = files.engine
    engine.ask(NAME, prompts(1, seed=40)[0])
    engine.run()
    assert engine.state(NAME) is AdapterState.RESIDENT
    first = _matrices(engine)
    files.forget()
    engine.ask(NAME, prompts(1, seed=40)[0])
    engine.run()
    for index, (a, b) in _matrices(engine).items():
        assert torch.equal(a, first[index][0]) and torch.equal(b, first[index][1])


def _matrices(engine: ColdEngine) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """The matrices of the only adapter on the device."""
    table = engine.parts.loaded.lora_table
    (row,) = np.flatnonzero(table.host_ranks.any(axis=1)).tolist()
    packed = {index: table.packed(row, index) for index in range(table.num_targets)}
    return {index: (lora.a.clone(), lora.b.clone()) for index, lora in packed.items() if lora}

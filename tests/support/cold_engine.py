"""A whole engine with real CPU workers behind a paced link, in the calling thread, step by step.

Decisions of the engine can be replaced (``chunks``) and its loads can be held (``hold_loads``), so
tests reach every state of a cold request without a clock.
"""

import contextlib
import itertools
import os
import threading
import time
import unittest.mock
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import torch
from corun.cpu_workers import pool
from corun.cpu_workers.pool import PoolConfig, WorkerPool
from corun.gpu.coexec.assistant import Assistant
from corun.gpu.coexec.invocation import Invocation
from corun.profiles.link import Direction
from corun.runtime.coldstart.planner import Planner, PlannerConfig
from corun.runtime.coldstart.strategy import LoadStrategy
from corun.runtime.config.engine import EngineConfig
from corun.runtime.engine.assembly.build import build_engine
from corun.runtime.engine.messages import AddAdapter, AddRequest, OperationDone, RemoveAdapter
from corun.runtime.memory.adapter_cache import AdapterState
from corun.runtime.plan import AdapterId, Result, StepPlan, SubBatchKind, TransferId, TransferProgress
from corun.runtime.request import Request
from corun.runtime.sampling import SamplingParams
from corun.runtime.scheduler.cold import ColdChunk, StepRows
from corun.shm.arena import HostArena
from support.invariants import check_invariants
from support.model_profiles import Figures, save_made_up_profile
from support.scheduling import loads_of
from support.worker_pool import supervisor, table_of, workers


@contextlib.contextmanager
def pool_with(num_workers: int, delta_backend: str | None) -> Iterator[None]:
    """More workers than the options permit on this machine, and a table for a fixed back end."""

    def changed(**options: Any) -> PoolConfig:
        config = PoolConfig(**options)
        return replace(
            config,
            worker_cpus=config.worker_cpus * num_workers,
            delta_table=None if delta_backend is None else table_of(delta_backend),
        )

    with unittest.mock.patch.object(pool, "PoolConfig", changed):
        yield


TIMEOUT_S = 60.0
Chunks = Callable[[Request, int], ColdChunk | None]  # of a request, with at most so many tokens


@dataclass
class Answer:
    """The result of one request."""

    adapter: str | None
    prompt: tuple[int, ...]
    token_ids: list[int] = field(default_factory=list)
    candidates: list[dict[int, float]] = field(default_factory=list)
    finish_reason: str | None = None
    error: str | None = None


class ColdEngine:
    """See the module. One at a time in a process: all workers of the process count as its own."""

    def __init__(
        self,
        model: Path,
        adapters: Mapping[str, Path],
        directory: Path,
        *,
        figures: Figures | None = None,
        num_workers: int = 1,
        **options: Any,
    ) -> None:
        """``options`` replace those of a bfloat16 engine on one core, all workers on the other.

        With a ``delta_backend`` the workers measure nothing. On CUDA it runs what a server does.
        Prefixes are not kept unless asked for: prompts are here to be computed.
        """
        cpus = sorted(os.sched_getaffinity(0))
        defaults: dict[str, Any] = {
            "model": str(model),
            "device": "cpu",
            "dtype": "bfloat16",
            "memory_gib": 0.02,
            "link_gib_per_s": 0.001,
            "engine_cores": str(cpus[0]),
            "cpu_cores": str(cpus[-1]),
            "load_strategy": "assisted",
            "host_bytes": "64MiB",
            "block_size": 4,
            "prefix_cache": "off",
        }
        if options.get("device") == "cuda":
            defaults["memory_gib"] = 0.1  # which is cut in two, for blocks and for adapters
        else:
            backends = {"linear": "plain", "attention": "torch", "lora": "torch"}
            defaults |= {f"{part}_backend": name for part, name in backends.items()}
        config = EngineConfig(**(defaults | options))
        profile = save_made_up_profile(config, directory / "profile.json", figures)
        config = EngineConfig(**(defaults | options | {"profile": str(profile)}))
        self._before = torch.get_num_threads(), os.sched_getaffinity(0)
        self._ids = itertools.count(1)
        self.plans: list[StepPlan] = []
        self.max_cold_rows = 0  # in any of these plans
        self.num_host_cached_tokens = 0  # of all prompts
        self.answers: dict[int, Answer] = {}
        self._num_arrived: dict[AdapterId, int] = {}
        self._gate = threading.Event()
        self._gate.set()
        with pool_with(num_workers, options.get("delta_backend")):
            self.assembly = build_engine(config, on_progress=lambda _: None, own_process=False)
        self.core = self.assembly.core
        self.parts = self.assembly.parts
        self.scheduler = self.parts.scheduler
        assert self.parts.coexecution is not None
        self.coexecution = self.parts.coexecution
        self._watch_executor()
        self._gate_loads()
        for name, path in adapters.items():
            self.register(name, path)

    # Adapters.

    def register(self, name: str, path: Path) -> None:
        self._operate(AddAdapter(next(self._ids), name, str(path)))

    def register_unread(self, name: str, path: Path) -> None:
        """Serve it as one of a directory; the first request's load reads its values."""
        self.assembly.adapters.add_unread(name, str(path))
        self.wait_read(name)

    def wait_read(self, name: str) -> None:
        """Have what requests for ``name`` wait for be read, as for a mix or a first use."""
        deadline_s = time.monotonic() + TIMEOUT_S
        while self.assembly.adapters.must_wait(name):
            assert time.monotonic() < deadline_s, f"{name} was not read in time"
            self.assembly.adapters.poll()
            time.sleep(0.001)

    def unregister(self, name: str) -> None:
        """Begin to; its running requests go on."""
        self.assembly.adapters.handle(RemoveAdapter(next(self._ids), name))
        self.assembly.adapters.poll()

    def adapter_id(self, name: str) -> AdapterId:
        return self.assembly.adapters.resolve(name).adapter_id

    def state(self, name: str) -> AdapterState:
        return self.scheduler.memory.cache.state(self.adapter_id(name))

    def num_groups_arrived(self, name: str) -> int:
        """Layer groups of the running load, from the first on, that the executor has reported."""
        return self._num_arrived.get(self.adapter_id(name), 0)

    def cool(self, *names: str) -> None:
        """Take adapters off the device."""
        for name in names:
            if self.state(name) is not AdapterState.ABSENT:
                assert self.core.evict_adapter(name)
        self.run_until(lambda: all(self.state(name) is AdapterState.ABSENT for name in names))

    def empty_host(self) -> None:
        """Let the host's memory keep nothing that is not in use."""
        host = self.scheduler.memory.host
        assert host is not None
        host.keep_within(0)
        host.keep_within(self.arena.capacity_bytes)
        self.run_until(lambda: not self.scheduler.has_work())

    def warm(self, *names: str) -> None:
        """Bring adapters to the device."""
        for name in names:
            self.ask(name, (5,), max_tokens=1)
        self.run()
        assert all(self.state(name) is AdapterState.RESIDENT for name in names)

    # Requests.

    def ask(
        self,
        adapter: str | None,
        prompt: Sequence[int],
        max_tokens: int = 6,
        *,
        predicted_output_tokens: int | None = None,
        **params: Any,
    ) -> Answer:
        """Begin a greedy request; ``run`` ends it."""
        request_id = next(self._ids)
        values = {"temperature": 0.0, "logprobs": 20, "ignore_eos": True, "seed": 0} | params
        sampling = SamplingParams(max_tokens=max_tokens, **values)
        self.core.add_request(
            AddRequest(
                request_id, tuple(prompt), sampling, adapter, predicted_output_tokens=predicted_output_tokens
            )
        )
        self.answers[request_id] = Answer(adapter, tuple(prompt))
        return self.answers[request_id]

    def abort(self, answer: Answer) -> None:
        self.core.abort([number for number, other in self.answers.items() if other is answer])

    def step(self) -> None:
        """One turn: what can be done now is done."""
        for update in self.core.step(timeout_s=0.002):
            answer = self.answers[update.request_id]
            answer.token_ids += update.token_ids
            self.num_host_cached_tokens += update.num_host_cached_tokens
            for one in update.logprobs or ():
                answer.candidates.append(dict(zip(one.top_token_ids, one.top_logprobs, strict=True)))
            answer.finish_reason, answer.error = update.finish_reason, update.error

    def run_until(self, is_true: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + TIMEOUT_S
        while not is_true():
            assert time.monotonic() < deadline_s, "it did not come true in time"
            self.step()

    def run(self) -> list[Answer]:
        """Answer everything that was asked; returns and forgets it."""
        self.run_until(lambda: all(a.finish_reason for a in self.answers.values()))
        self.run_until(lambda: not self.scheduler.has_work())
        check_invariants(self.scheduler)
        answers = list(self.answers.values())
        self.answers.clear()
        return answers

    # What is replaced.

    def use_strategy(self, strategy: LoadStrategy | None) -> Planner:
        """Force it; None = let the planner choose. Returns the planner, which knows nothing yet."""
        planner = Planner(self.coexecution.profile.model, PlannerConfig(forced=strategy))
        self.coexecution.cold_starts.set_planner(planner)
        return planner

    @contextlib.contextmanager
    def chunks(self, chunks: Chunks) -> Iterator[None]:
        """Let ``chunks`` cut cold requests, and start each at once."""
        replaced: dict[str, Any] = {
            "may_start": lambda request, *_: self._is_loading(request) and not request.retried_positions,
            "next_chunk": lambda *arguments: self._chunk(chunks, *arguments),
        }
        with mock.patch.multiple(self.coexecution.cold_starts, **replaced):
            yield

    @contextlib.contextmanager
    def watched_sends(self, sent: Callable[[Invocation], None]) -> Iterator[None]:
        """Call ``sent`` with each invocation after its x is sent, so that its worker may begin."""
        handover: Any = self.assistant.handover
        send = handover.send

        def watched(invocation: Invocation, x: torch.Tensor) -> None:
            send(invocation, x)
            sent(invocation)

        handover.send = watched
        try:
            yield
        finally:
            del handover.send

    @contextlib.contextmanager
    def held_loads(self) -> Iterator[None]:
        """Let no copy to the device begin."""
        self._gate.clear()
        try:
            yield
        finally:
            self._gate.set()

    def release_loads(self) -> None:
        """Before the end of ``held_loads``."""
        self._gate.set()

    # What is left behind.

    @property
    def pool(self) -> WorkerPool:
        assert self.coexecution.pool is not None
        return self.coexecution.pool

    @property
    def num_assisted_rows(self) -> int:
        """Rows with deltas from workers in at least one layer."""
        return sum(split > 0 for batch in self.assisted for split in batch.split_layers)

    @property
    def assisted(self) -> list[Any]:
        return [
            batch for plan in self.plans for batch in plan.sub_batches if batch.kind is SubBatchKind.ASSISTED
        ]

    def check_nothing_is_held(self) -> None:
        """With all adapters off the device, everything is free."""
        names = [info.name for info in self.assembly.adapters.infos()]
        self.cool(*names)
        memory = self.scheduler.memory
        num_kept_bytes = memory.pool.num_cached_blocks * memory.pool.block_bytes
        assert memory.budget.free_bytes + num_kept_bytes == memory.budget.capacity_bytes
        assert memory.pool.num_used_blocks == len(memory.transfers) == 0
        assert self.parts.executor.is_idle
        assert self.parts.loaded.lora_table.num_free_rows == self.parts.loaded.lora_table.capacity
        check_invariants(self.arena)
        assert self.arena.num_references == 0
        assert memory.host is not None
        assert self.arena.place_ids == memory.host.place_ids
        assert self.arena.taken_bytes == memory.host.taken_bytes
        pool = self.coexecution.pool  # none where the model is not in bfloat16
        assert pool is None or not pool.end.num_outstanding

    @property
    def arena(self) -> HostArena:
        return self.parts.host_adapters.arena

    @property
    def processes(self) -> list[psutil.Process]:
        """The supervisor and its workers."""
        return [supervisor(), *workers()]

    @property
    def assistant(self) -> Assistant:
        return self.coexecution.assistant

    def wait_workers(self) -> None:
        self.pool.wait_ready(TIMEOUT_S)

    def close(self) -> None:
        self._gate.set()
        self.assembly.close()
        if torch.cuda.is_initialized():  # the engine has adopted this thread's stream
            torch.cuda.set_stream(torch.cuda.default_stream())
        torch.set_num_threads(self._before[0])
        os.sched_setaffinity(0, self._before[1])

    def __enter__(self) -> "ColdEngine":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # Inside.

    def _is_loading(self, request: Request) -> bool:
        cache = self.scheduler.memory.cache
        return cache.state(request.adapter_id) is AdapterState.LOADING

    def _chunk(self, chunks: Chunks, request: Request, max_tokens: int, *others: Any) -> ColdChunk | None:
        num_retries = request.retried_positions[request.num_computed_tokens]
        if num_retries > 1 or not self._is_loading(request):
            cold_starts = self.coexecution.cold_starts
            return type(cold_starts).next_chunk(cold_starts, request, max_tokens, *others)
        limit = min(max_tokens, request.num_pending_tokens, self._room_of_workers(others[1]))
        return chunks(request, limit) if limit else None

    def _room_of_workers(self, rows: StepRows) -> int:
        """Tokens that their memory holds beside what the step has."""
        return self.pool.config.max_tokens - sum(chunk.num_tokens for _, chunk in rows.cold_chunks)

    def _watch_executor(self) -> None:
        executor: Any = self.parts.executor
        submit, poll = executor.submit, executor.poll
        loads: dict[TransferId, AdapterId] = {}

        def note_plan(plan: StepPlan) -> None:
            self.plans.append(plan)
            open_requests = {request.request_id: request for request in self.scheduler.requests}
            rows = [row for batch in plan.sub_batches for row in batch.request_ids]
            num_cold = sum(row in open_requests and open_requests[row].is_cold for row in rows)
            self.max_cold_rows = max(self.max_cold_rows, num_cold)
            for load in loads_of(plan):
                loads[load.transfer_id] = load.adapter_id
            for adapter_id in plan.evict_adapters:
                self._num_arrived.pop(adapter_id, None)
            submit(plan)

        def note_results(timeout_s: float = 0.0) -> list[Result]:
            results: list[Result] = poll(timeout_s)
            for result in results:
                if isinstance(result, TransferProgress):
                    self._num_arrived[loads[result.transfer_id]] = result.num_groups
            return results

        executor.submit, executor.poll = note_plan, note_results

    def _gate_loads(self) -> None:
        link: Any = self.parts.loaded.device.link
        begin = link.begin

        def held(direction: Direction, num_bytes: int, **arguments: Any) -> Any:
            if direction is Direction.TO_DEVICE:
                assert self._gate.wait(TIMEOUT_S), "loads were held for too long"
            return begin(direction, num_bytes, **arguments)

        link.begin = held

    def _operate(self, message: AddAdapter) -> None:
        self.assembly.adapters.handle(message)
        deadline_s = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline_s:
            for event in self.assembly.adapters.poll():
                if isinstance(event, OperationDone) and event.operation_id == message.operation_id:
                    assert event.error is None, event.error
                    return
            time.sleep(0.001)
        raise AssertionError("the adapter was not registered in time")

"""Under faults of workers under load, no request fails and no answer changes."""

import signal
from collections.abc import Callable, Iterator

import psutil
import pytest
from corun.gpu.coexec.invocation import Invocation
from corun.gpu.lora.adapter_layout import GroupKey
from corun.runtime.plan import RequestId
from corun.runtime.request import Request
from corun.runtime.scheduler.cold import ColdChunk
from corun.shm.errors import WorkerUnavailableError
from support.cold_engine import ColdEngine
from support.cold_parity import NUM_LAYERS, check, make_case, prompts, split_at
from support.parity import ParityCase
from support.residue import held
from support.worker_pool import are_gone, wait_until

KILL, STOP = signal.SIGKILL, signal.SIGSTOP


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> ParityCase:
    return make_case(tmp_path_factory.mktemp("deep"))


@pytest.fixture(scope="module")
def engine(case: ParityCase, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ColdEngine]:
    before = held()
    with ColdEngine(
        case.directory, case.adapters, tmp_path_factory.mktemp("engine"), num_workers=2, delta_backend="numpy"
    ) as engine:
        yield engine
        pids = [process.pid for process in engine.processes]
    assert are_gone(pids)
    del engine
    assert not held().since(before)


class Strike:
    """Signals processes in the middle of assisted passes, when x of a group is sent."""

    def __init__(self, hit: Callable[[], None], key: GroupKey, max_hits: int = 1) -> None:
        self.num_hits = 0
        self._hit = hit
        self._key = key
        self._max_hits = max_hits

    def __call__(self, invocation: Invocation) -> None:
        if invocation.key == self._key and self.num_hits < self._max_hits:
            self.num_hits += 1
            self._hit()


def workers_of(processes: list[psutil.Process]) -> list[psutil.Process]:
    return processes[1:]


def one_worker(processes: list[psutil.Process]) -> list[psutil.Process]:
    return processes[1:2]


def supervisor_of(processes: list[psutil.Process]) -> list[psutil.Process]:
    return processes[:1]


def everybody(processes: list[psutil.Process]) -> list[psutil.Process]:
    return processes


def pids_of(engine: ColdEngine) -> list[int]:
    try:
        return [process.pid for process in engine.processes]
    except (ValueError, psutil.NoSuchProcess):  # the supervisor is being replaced
        return []


@pytest.mark.parametrize(
    ("who", "number", "key"),
    [
        (one_worker, KILL, (0, 0)),
        pytest.param(one_worker, STOP, (2, 1), marks=pytest.mark.full),
        pytest.param(workers_of, KILL, (1, 3), marks=pytest.mark.full),
        (workers_of, STOP, (3, 3)),
        (supervisor_of, KILL, (2, 0)),
        pytest.param(everybody, KILL, (1, 0), marks=pytest.mark.full),
        (everybody, STOP, (0, 2)),
    ],
)
def test_a_fault_in_mid_pass(
    engine: ColdEngine,
    case: ParityCase,
    who: Callable[[list[psutil.Process]], list[psutil.Process]],
    number: signal.Signals,
    key: GroupKey,
) -> None:
    """Four cold requests are in the pass; a warm one and one of the base run beside them."""
    engine.wait_workers()
    engine.warm("rs")
    names = ["rs", None, "plain", "patterns", "attention", "one"]
    before = engine.core.stats()
    hit = who(engine.processes)

    def strike() -> None:
        for process in hit:
            process.send_signal(number)

    strikes = Strike(strike, key)
    with engine.watched_sends(strikes), engine.chunks(split_at(NUM_LAYERS, 16)):
        for name, prompt in zip(names, prompts(len(names), seed=7), strict=True):
            engine.ask(name, prompt, max_tokens=8)
        answers = engine.run()
    assert strikes.num_hits == 1
    check(case, answers)
    after = engine.core.stats()
    assert after.num_retried_rows > before.num_retried_rows
    assert after.cpu_workers.num_failed_jobs > before.cpu_workers.num_failed_jobs
    assert after.num_failed_steps == 0
    wait_until(lambda: not any(process.pid in pids_of(engine) for process in hit))
    engine.wait_workers()
    assert are_gone([process.pid for process in hit])
    engine.check_nothing_is_held()


def test_workers_that_die_again_and_again(engine: ColdEngine, case: ParityCase) -> None:
    """Each request loses them once and then runs without workers."""
    before = engine.core.stats()

    def kill_all() -> None:
        for process in engine.processes[1:]:
            process.send_signal(KILL)

    strikes = Strike(kill_all, (1, 1), max_hits=3)
    with engine.watched_sends(strikes), engine.chunks(split_at(NUM_LAYERS, 4)):
        for number, name in enumerate(["plain", "patterns", "rs"]):
            engine.wait_workers()
            engine.ask(name, prompts(1, seed=8 + number)[0], max_tokens=8)
            while strikes.num_hits == number:
                engine.step()
        answers = engine.run()
    assert engine.core.stats().num_retried_rows == before.num_retried_rows + 3
    check(case, answers)
    engine.wait_workers()
    engine.check_nothing_is_held()


def test_workers_that_are_gone_when_a_pass_begins(
    engine: ColdEngine, case: ParityCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that need them are retried; a row retried before loses a step beside them."""
    before = engine.core.stats().num_retried_rows
    engine.plans.clear()
    late: list[RequestId] = []  # goes on when the other one has come
    has_second = False

    def cut(request: Request, max_tokens: int) -> ColdChunk | None:
        if request.retried_positions and not has_second:
            late.append(request.request_id)
            return None
        return ColdChunk(min(max_tokens, 4), 0 if request.retried_positions else NUM_LAYERS)

    def submit(*arguments: object) -> None:
        raise WorkerUnavailableError("it has just died")

    monkeypatch.setattr(engine.pool, "submit", submit)
    with engine.held_loads(), engine.chunks(cut):
        engine.ask("plain", prompts(1, seed=18)[0], max_tokens=8)
        engine.run_until(lambda: bool(late))
        assert engine.core.stats().num_retried_rows == before + 1
        has_second = True
        engine.ask("patterns", prompts(1, seed=19)[0], max_tokens=8)
        engine.release_loads()
        answers = engine.run()
    splits = [batch.split_layers for batch in engine.assisted]
    together = next(i for i, split in enumerate(splits) if set(split) == {0, NUM_LAYERS})
    assert splits[together + 1 : together + 3] == [(0,), (0,)]  # each alone, without workers
    assert engine.core.stats().num_retried_rows == before + 3
    check(case, answers)
    engine.check_nothing_is_held()

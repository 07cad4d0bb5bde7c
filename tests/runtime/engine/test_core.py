"""The engine's turn, with the real scheduler and registry and an executor without a device."""

import itertools
import logging
from collections.abc import Callable, Generator
from mmap import PAGESIZE
from typing import Any

import pytest
from corun.runtime.adapter import AdapterFacts
from corun.runtime.adapters.content import AdapterContent
from corun.runtime.adapters.conventions import NO_CONVENTIONS, AdapterConventions
from corun.runtime.adapters.registry import AdapterRegistry
from corun.runtime.engine.core import CoreConfig, EngineCore
from corun.runtime.engine.messages import AddRequest, CpuWorkerStats
from corun.runtime.engine.stats import CpuStats
from corun.runtime.errors import AdapterChangedError, EngineDeadError, RequestError, UnknownModelError
from corun.runtime.memory.grant import Verdict
from corun.runtime.memory.host_cache import HostCache
from corun.runtime.plan import AdapterId, Outcome, StepId, StepPlan, WorkersChanged
from corun.runtime.request import Request
from corun.runtime.sampling import SamplingParams
from corun.runtime.scheduler.cold import ColdStarts, StepRows
from corun.runtime.scheduler.events import RequestUpdate
from corun.runtime.scheduler.keyed import FcfsPolicy
from support.fake_executor import FakeExecutor, expected_output
from support.invariants import check_invariants
from support.scheduling import Guess, make_executor, make_memory, make_scheduler, policy_facts

MAX_MODEL_LEN = 64


class Engine:
    """A core and its surroundings."""

    def __init__(
        self,
        *,
        depth: int = 1,
        num_blocks: int = 64,
        is_automatic: bool = True,
        host: HostCache | None = None,
        **limits: Any,
    ) -> None:
        self.scheduler = make_scheduler(memory=make_memory(num_blocks=num_blocks, host=host), **limits)
        self.executor = make_executor(self.scheduler, is_automatic=is_automatic)
        ids = itertools.count(1)
        self.registry = AdapterRegistry(lambda: AdapterId(next(ids)))
        self.gone: list[AdapterId] = []
        self.workers = CpuWorkerStats()
        self.now_s = 0.0
        self.core = EngineCore(
            self.scheduler,
            self.executor,
            self.registry,
            CoreConfig(base_fingerprint="demo", dtype="float32", max_steps_in_flight=depth),
            clock=lambda: self.now_s,
            on_adapter_gone=self.gone.append,
            cpu=lambda: CpuStats(self.workers),
        )

    def register(
        self,
        name: str,
        digest: str = "d",
        num_bytes: int = 200,
        host_bytes: tuple[int, ...] = (),
        conventions: AdapterConventions = NO_CONVENTIONS,
    ) -> AdapterId:
        load_id = self.registry.begin_loading(name, "/path")
        facts = AdapterFacts(digest, 8, num_bytes, host_bytes=host_bytes)
        registered = self.registry.ready(name, "/path", load_id, AdapterContent(facts, conventions))
        assert registered is not None
        for adapter_id in registered.freed:
            self.core.drop_adapter(adapter_id)
        return registered.version.adapter_id

    def add(self, request_id: int, adapter: str | None = None, **sampling: Any) -> AddRequest:
        sampling.setdefault("max_tokens", 4)
        message = AddRequest(request_id, (request_id, 2, 3), SamplingParams(**sampling), adapter_name=adapter)
        self.core.add_request(message)
        return message

    def run(self) -> list[RequestUpdate]:
        updates: list[RequestUpdate] = []
        for _ in range(1000):
            if not self.core.has_work:
                return updates
            updates += self.core.step()
        raise AssertionError("no end")


def ends_of(updates: list[RequestUpdate]) -> dict[int, str | None]:
    ends = [update for update in updates if update.finish_reason is not None]
    assert len({update.request_id for update in ends}) == len(ends), "a request ends twice"
    return {update.request_id: update.finish_reason for update in ends}


@pytest.mark.parametrize("depth", [1, 2])
def test_tokens_come_in_order_and_everything_is_let_go(depth: int) -> None:
    # Admitted with a low prediction, so that they run out of room.
    engine = Engine(depth=depth, num_blocks=17, predictor=Guess(1))
    adapter_id = engine.register("a")
    messages = [
        engine.add(request_id, "a" if request_id % 2 else None, max_tokens=20) for request_id in range(1, 11)
    ]
    updates = engine.run()
    for message in messages:
        tokens = [
            token_id
            for update in updates
            if update.request_id == message.request_id
            for token_id in update.token_ids
        ]
        expected, reason = expected_output(
            message.prompt_token_ids,
            message.sampling,
            adapter_id if message.adapter_name else AdapterId(0),
            max_model_len=MAX_MODEL_LEN,
        )
        assert tokens == expected
        assert ends_of(updates)[message.request_id] == reason
    stats = engine.core.stats()
    assert stats.num_preemptions > 0
    assert (stats.kv_blocks_used, stats.kv_blocks_total) == (0, 17)
    assert (stats.generated_tokens, stats.prompt_tokens_computed) == (200, 30)
    assert (stats.num_running, stats.num_waiting, stats.num_failed_steps) == (0, 0, 0)
    check_invariants(engine.registry)


def test_end_tokens_of_an_adapter_end_its_requests_alone() -> None:
    engine = Engine()
    adapter_id = engine.register("a")
    message = engine.add(1, "a", max_tokens=20)
    engine.run()
    tokens, _ = expected_output(
        message.prompt_token_ids, message.sampling, adapter_id, max_model_len=MAX_MODEL_LEN
    )
    ends = AdapterConventions(eos_token_ids=(tokens[4],), digest="c")
    assert engine.register("a", conventions=ends) == adapter_id
    asked: tuple[dict[str, Any], ...] = ({}, {"ignore_eos": True}, {"min_tokens": 20})
    for sampling, reason in zip(asked, ("stop", "length", "length"), strict=True):
        engine.add(1, "a", max_tokens=20, **sampling)
        updates = engine.run()
        assert ends_of(updates)[1] == reason
        assert updates[-1].stop_token_id == (tokens[4] if reason == "stop" else None)
    engine.register("a", "d")
    engine.add(1, "a", max_tokens=20)
    assert ends_of(engine.run())[1] == "length"


def test_a_request_tells_which_weights_and_conventions_it_began_with() -> None:
    engine = Engine()

    def told() -> list[str]:
        return [one.timing.adapter_version for one in engine.run() if one.timing is not None]

    engine.register("a")
    engine.add(1, "a")
    engine.register("a", conventions=AdapterConventions("x", digest="c"))
    engine.add(2, "a")
    engine.add(3)
    assert sorted(set(told())) == ["", "d", "d+c"]


def test_a_prompt_that_other_conventions_made_is_refused() -> None:
    engine = Engine()
    engine.register("a", conventions=AdapterConventions("x", digest="new"))
    sampling = SamplingParams(max_tokens=4)
    for made_by in (None, "new"):
        engine.core.add_request(AddRequest(1, (1, 2), sampling, "a", conventions=made_by))
        assert ends_of(engine.run()) == {1: "length"}
    for made_by in ("", "old"):
        with pytest.raises(AdapterChangedError, match="adapter 'a' was reloaded"):
            engine.core.add_request(AddRequest(1, (1, 2), sampling, "a", conventions=made_by))
    assert not engine.core.has_work
    check_invariants(engine.registry)


def test_the_state_of_the_cpu_workers_is_told() -> None:
    engine = Engine()
    assert engine.core.stats().cpu_workers == CpuWorkerStats()
    engine.workers = CpuWorkerStats(num_workers=2, num_ready=1)
    assert engine.core.stats().cpu_workers.num_ready == 1


@pytest.mark.parametrize("depth", [1, 2])
def test_no_more_steps_are_in_flight_than_allowed(depth: int) -> None:
    engine = Engine(depth=depth, is_automatic=False)
    engine.add(1)
    assert engine.core.step() == []
    assert len(engine.executor.steps) == depth
    assert not engine.core.is_ready
    assert engine.core.step() == []
    assert len(engine.executor.steps) == depth


def test_an_idle_core_has_nothing_to_do_and_says_so() -> None:
    engine = Engine()
    assert not engine.core.has_work
    assert not engine.core.is_ready
    assert engine.core.step(timeout_s=60.0) == []
    assert engine.executor.plans == []
    engine.add(1)
    assert engine.core.is_ready
    engine.run()
    engine.core.step()
    assert not engine.core.is_ready


def test_a_core_that_returns_nothing_waits_for_the_executor() -> None:
    """A caller that sleeps on the descriptor after an empty step misses nothing."""
    engine = Engine(is_automatic=False, max_num_batched_tokens=2)
    engine.register("a")
    engine.add(1, "a")
    num_turns = 0
    updates: list[RequestUpdate] = []
    while engine.core.has_work:
        news = engine.core.step()
        updates += news
        num_turns += 1
        assert num_turns < 50
        if not news:
            assert not engine.core.is_ready
            assert engine.executor.steps or engine.executor.transfers, "waits for nothing"
            for transfer_id in list(engine.executor.transfers):
                engine.executor.finish_transfer(transfer_id)
            if engine.executor.steps:
                engine.executor.finish_step()
    assert ends_of(updates) == {1: "length"}


def test_steps_and_copies_for_requests_are_awaited_and_their_results_are_progress() -> None:
    engine = Engine(is_automatic=False)
    engine.register("a")
    assert not engine.core.awaits_device
    engine.add(1, "a", max_tokens=1)
    engine.core.step()
    assert engine.core.awaits_device  # the copy of its adapter
    before = engine.core.num_advances
    engine.core.step()
    assert engine.core.num_advances == before
    while engine.core.has_work:
        for transfer_id in list(engine.executor.transfers):
            engine.executor.finish_transfer(transfer_id)
        if engine.executor.steps:
            assert engine.core.awaits_device
            engine.executor.finish_step()
        before = engine.core.num_advances
        engine.core.step()
        assert engine.core.num_advances > before
    assert not engine.core.awaits_device


def test_an_abort_is_told_with_the_next_step() -> None:
    engine = Engine(max_num_seqs=1)
    engine.add(1, max_tokens=50)
    engine.add(2)
    engine.core.step()
    engine.core.abort([1, 2, 77])
    assert engine.core.has_work
    assert engine.core.is_ready
    assert ends_of(engine.core.step(timeout_s=60.0)) == {1: "abort", 2: "abort"}
    assert engine.run() == []
    engine.core.abort([1])
    assert engine.run() == []


def test_refused_requests_hold_nothing() -> None:
    engine = Engine()
    engine.register("a")
    with pytest.raises(UnknownModelError):
        engine.add(1, "b")
    with pytest.raises(RequestError, match="--max-model-len"):
        engine.core.add_request(AddRequest(2, (1,) * 64, SamplingParams(), adapter_name="a"))
    assert not engine.core.has_work
    assert engine.registry.remove("a") == (1,)


class OpensAt(FcfsPolicy):
    """Admits no request before a time, and never drops its deadline."""

    def __init__(self, opens_at_s: float) -> None:
        super().__init__(policy_facts())
        self._opens_at_s = opens_at_s

    def candidates(self, now_s: float) -> Generator[Request, Verdict, None]:
        if now_s >= self._opens_at_s:
            yield from super().candidates(now_s)

    def wake_at_s(self) -> float | None:
        return self._opens_at_s


class TestDeadlineOfThePolicy:
    def test_whoever_waits_is_told_until_when(self) -> None:
        engine = Engine(policy=OpensAt(5.0))
        engine.add(1)
        for engine.now_s in (0.0, 4.9):
            assert engine.core.step() == []
            assert not engine.core.is_ready
            assert engine.core.wake_at_s() == 5.0
            assert engine.executor.plans == []
        engine.now_s = 5.0
        assert ends_of(engine.run()) == {1: "length"}

    def test_a_step_does_not_wait_beyond_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        engine = Engine(policy=OpensAt(5.0))
        engine.add(1)
        timeouts_s = []

        def poll(timeout_s: float) -> list[Any]:
            timeouts_s.append(timeout_s)
            engine.now_s += timeout_s
            return []

        with monkeypatch.context() as patch:
            patch.setattr(engine.executor, "poll", poll)
            assert engine.core.step(timeout_s=3.0) == []
            assert engine.core.step(timeout_s=3.0) == []
        assert timeouts_s == [0.0, 3.0, 0.0, 2.0]
        assert ends_of(engine.run()) == {1: "length"}

    def test_one_that_has_passed_wakes_nobody_again(self) -> None:
        engine = Engine(policy=OpensAt(5.0), depth=2, is_automatic=False, max_num_seqs=1)
        engine.now_s = 4.0
        engine.core.step()
        assert engine.core.wake_at_s() == 5.0
        engine.now_s = 6.0
        engine.add(1, max_tokens=1)
        engine.add(2)
        for _ in range(2):  # the second waits for a slot at any time
            assert engine.core.step() == []
            assert len(engine.executor.steps) == 1
            assert not engine.core.is_ready
            assert engine.core.wake_at_s() is None

    def test_while_no_step_can_be_submitted_there_is_none(self) -> None:
        engine = Engine(policy=OpensAt(5.0), is_automatic=False)
        engine.now_s = 5.0
        engine.add(1)
        engine.core.step()
        engine.now_s = 4.0  # as if the policy had set itself another one
        assert len(engine.executor.steps) == 1
        assert engine.core.wake_at_s() is None


def test_a_request_that_waits_too_long_wakes_the_core_and_ends(caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine(policy=OpensAt(50.0), max_queue_s=5.0)
    adapter_id = engine.register("a")
    engine.add(1, "a")
    engine.now_s = 1.0
    engine.add(2)
    for engine.now_s, wake_at_s, ended in ((4.9, 5.0, {}), (5.0, 6.0, {1: "error"})):
        assert ends_of(engine.core.step()) == ended
        assert engine.core.wake_at_s() == wake_at_s
    engine.now_s = 7.0
    (update,) = engine.core.step()
    assert (update.request_id, update.error_kind) == (2, "OverloadedError")
    assert not engine.core.has_work and not engine.core.is_ready
    assert engine.registry.remove("a") == (adapter_id,)  # no request uses it
    assert caplog.records == []  # under load they are many


def test_a_prediction_of_the_client_is_kept_within_the_limit() -> None:
    engine = Engine()
    for request_id, predicted in ((1, 3), (2, 1000), (3, None)):
        message = AddRequest(
            request_id, (1, 2), SamplingParams(max_tokens=9), predicted_output_tokens=predicted
        )
        engine.core.add_request(message)
    predictions = [r.num_predicted_output_tokens for r in engine.scheduler.requests]
    assert predictions == [3, 9, 9]  # nothing has ended: as long as may be


class TestAdapters:
    def test_a_removed_adapter_leaves_the_device_after_its_last_request(self) -> None:
        engine = Engine()
        adapter_id = engine.register("a")
        engine.add(1, "a")
        engine.core.step()
        assert engine.registry.remove("a") == ()
        assert ends_of(engine.run()) == {1: "length"}
        assert engine.gone == [adapter_id]
        assert engine.executor.resident_adapters == set()
        stats = engine.core.stats()
        assert stats.memory_bytes["device"]["adapters"] == 0
        assert stats.adapter_evictions == {"device": {"dropped": 1}}

    def test_a_reload_serves_new_requests_with_the_new_version(self) -> None:
        engine = Engine()
        old_id = engine.register("a", "old")
        old = engine.add(1, "a", max_tokens=9)
        engine.core.step()
        new_id = engine.register("a", "new")
        new = engine.add(2, "a", max_tokens=9)
        updates = engine.run()
        for message, adapter_id in ((old, old_id), (new, new_id)):
            tokens = [
                token_id
                for update in updates
                if update.request_id == message.request_id
                for token_id in update.token_ids
            ]
            assert (
                tokens
                == expected_output(
                    message.prompt_token_ids, message.sampling, adapter_id, max_model_len=MAX_MODEL_LEN
                )[0]
            )
        assert engine.gone == [old_id]
        assert engine.core.residency(engine.registry.version(new_id)).level == "device"
        assert engine.core.take_changed_adapters().adapter_ids == {old_id, new_id}

    def test_statistics_name_the_adapters(self) -> None:
        engine = Engine(max_num_seqs=1)
        engine.register("a")
        engine.register("b")
        engine.add(1, "a")
        engine.core.step()
        engine.core.step()
        engine.add(2, "b")
        stats = engine.core.stats()
        assert (stats.running_adapters, stats.waiting_adapters) == (("a",), ("b",))
        assert (stats.num_running, stats.num_waiting) == (1, 1)
        assert stats.memory_bytes["device"]["adapters"] == 200

    def test_requests_have_the_namespace_of_all_that_shapes_their_kv(self) -> None:
        engine = Engine()
        engine.register("a", "d1")
        engine.register("b", "d2")
        engine.register("same", "d1")
        for request_id, adapter in enumerate((None, "a", "b", "same"), start=1):
            engine.add(request_id, adapter)
        salted = AddRequest(5, (1,), SamplingParams(), cache_salt="tenant")
        engine.core.add_request(salted)
        base, a, b, same, tenant = (request.namespace for request in engine.scheduler.requests)
        assert len({base, a, b, tenant}) == 4
        assert same == a

    def test_a_failed_load_is_told_and_the_reference_given_back(self) -> None:
        engine = Engine()
        adapter_id = engine.register("a")
        engine.executor.transfer_errors[adapter_id] = "broken"
        engine.add(1, "a")
        (update,) = engine.run()
        assert (update.finish_reason, update.error_kind) == ("error", "AdapterUnavailableError")
        assert "broken" in (update.error or "")
        assert engine.registry.remove("a") == (adapter_id,)


def raise_once(function: Callable[..., object], error: Exception) -> Callable[..., object]:
    """Raise on the first call, then do what ``function`` does."""
    errors = [error]

    def wrapper(*args: object) -> object:
        if errors:
            raise errors.pop()
        return function(*args)

    return wrapper


def test_what_has_changed_while_it_slept_is_known_before_the_next_step() -> None:
    engine = Engine(cold_starts=(cold_starts := CountingWorkers()))
    engine.add(1)
    assert ends_of(engine.run()) == {1: "length"}
    assert cold_starts.log == []
    engine.executor.deliver(WorkersChanged(3))
    engine.add(2)
    engine.core.step()
    assert cold_starts.log[:2] == ["3 workers", "step"]


class CountingWorkers(ColdStarts):
    """Records calls in order."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def workers_changed(self, num_ready: int) -> None:
        self.log.append(f"{num_ready} workers")

    def step_closed(self, step_id: StepId, rows: StepRows, now_s: float) -> None:
        if self.log:
            self.log.append("step")


def test_a_request_waits_for_the_host_while_another_adapter_is_registered() -> None:
    """Nothing is under way in the executor, but the engine is not stuck."""
    host = HostCache(2 * PAGESIZE)
    engine = Engine(host=host)
    engine.register("a", host_bytes=(PAGESIZE,) * 2)
    room = engine.core.place_registration((PAGESIZE,))
    assert room.place is not None
    engine.add(1, "a")
    assert engine.core.step() == [] and not engine.core.is_ready
    engine.core.end_registration(room.place.place_id, None)
    assert engine.core.is_ready
    assert ends_of(engine.run()) == {1: "length"}
    assert engine.core.stats().adapter_evictions["host"] == {}


class TestExceptions:
    def test_a_submit_that_raises_fails_its_requests_and_no_other(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        engine = Engine(max_num_seqs=2)
        for request_id in (1, 2, 3):
            engine.add(request_id)
        submit = raise_once(engine.executor.submit, ValueError("bad plan"))
        monkeypatch.setattr(engine.executor, "submit", submit)
        with caplog.at_level(logging.ERROR):
            updates = engine.run()
        assert ends_of(updates) == {1: "error", 2: "error", 3: "length"}
        assert {update.error for update in updates if update.error} == {"ValueError: bad plan"}
        assert "Traceback" in caplog.text
        assert engine.core.stats().num_failed_steps == 1

    @pytest.mark.parametrize("depth", [1, 2])
    def test_a_poll_that_raises_fails_the_oldest_step(
        self, depth: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        engine = Engine(depth=depth, max_num_seqs=1)
        engine.add(1)
        engine.add(2)
        poll = engine.executor.poll

        def losing(timeout_s: float) -> object:
            if not engine.executor.steps:
                return []
            engine.executor.lose_step()
            raise OSError("gone")

        monkeypatch.setattr(engine.executor, "poll", losing)
        updates = engine.core.step()
        monkeypatch.setattr(engine.executor, "poll", poll)
        updates += engine.run()
        assert ends_of(updates) == {1: "error", 2: "length"}

    @pytest.mark.parametrize("where", ["submit", "poll"])
    def test_a_dead_executor_is_the_callers(self, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
        engine = Engine()
        engine.add(1)
        dead = raise_once(getattr(engine.executor, where), EngineDeadError("the device is lost"))
        monkeypatch.setattr(engine.executor, where, dead)
        with pytest.raises(EngineDeadError, match="the device is lost"):
            engine.core.step()

    def test_a_poll_that_raises_without_a_step_is_the_callers(self, monkeypatch: pytest.MonkeyPatch) -> None:
        engine = Engine(is_automatic=False)
        engine.register("a")
        engine.add(1, "a")
        engine.core.step()
        engine.executor.finish_step()
        engine.core.step()
        assert engine.core.has_work
        poll = raise_once(engine.executor.poll, OSError("device lost"))
        monkeypatch.setattr(engine.executor, "poll", poll)
        with pytest.raises(OSError, match="device lost"):
            engine.core.step()

    def test_an_executor_that_never_accepts_does_not_hang_the_loop(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        engine = Engine()
        engine.register("a")
        engine.add(1, "a")
        engine.run()
        engine.add(2, "a")

        def refuse(self: FakeExecutor, plan: StepPlan) -> None:
            raise RuntimeError("no")

        monkeypatch.setattr(FakeExecutor, "submit", refuse)
        assert engine.registry.remove("a") == ()
        assert ends_of(engine.core.step()) == {2: "error"}
        assert engine.core.step() == []
        assert engine.core.has_work
        monkeypatch.undo()
        assert engine.run() == []
        assert engine.gone == [1]


@pytest.mark.parametrize("ends", ["abort", "error"])
def test_who_ends_without_a_token_is_told_what_it_waited_for(ends: str) -> None:
    engine = Engine(is_automatic=False)
    engine.add(1)
    engine.now_s = 3.0
    if ends == "abort":
        engine.core.abort([1])
    else:
        engine.core.step()
        engine.now_s = 4.0
        check_invariants(engine.scheduler)
        engine.executor.outcome_of = lambda request_id, start: Outcome.FAILED
        engine.executor.finish_step()
    (update,) = engine.core.step()
    assert update.finish_reason == ends and update.timing is not None
    assert sum(update.timing.parts.values()) == engine.now_s

"""``EngineHost``: every request and operation ends exactly once; no turn is in vain."""

import pytest
from corun.runtime.config.engine import EngineConfig
from corun.runtime.engine.host import EngineHost
from corun.runtime.engine.messages import (
    AbortRequests,
    AdaptersChanged,
    AddAdapter,
    AddRequest,
    AddRequests,
    FromEngine,
    OperationDone,
    RemoveAdapter,
    ReportMachine,
    ReportStats,
    StepOutputs,
)
from corun.runtime.errors import EngineDeadError, RequestError
from corun.runtime.sampling import SamplingParams, StructuredOutput
from corun.runtime.scheduler.events import RequestUpdate
from support import fake_core
from support.fake_core import MACHINE, FakeAssembly


@pytest.fixture
def assembly() -> FakeAssembly:
    return FakeAssembly(EngineConfig(model="fake", max_num_waiting=2))


@pytest.fixture
def host(assembly: FakeAssembly) -> EngineHost:
    return EngineHost(assembly)


def add(request_id: int, text: str, adapter_name: str | None = None) -> AddRequests:
    params = SamplingParams(seed=0, max_tokens=100)
    return AddRequests((AddRequest(request_id, tuple(text.encode()), params, adapter_name),))


def turn_until_idle(host: EngineHost) -> list[FromEngine]:
    told: list[FromEngine] = []
    while host.can_turn:
        told += host.turn()
    return told


def updates(told: list[FromEngine]) -> list[RequestUpdate]:
    return [one for step in told if isinstance(step, StepOutputs) for one in step.updates]


def final_ids(told: list[FromEngine]) -> list[int]:
    return [update.request_id for update in updates(told) if update.finish_reason is not None]


def test_a_fresh_host_comes_to_rest(host: EngineHost) -> None:
    turn_until_idle(host)
    assert not host.can_turn


def test_every_request_ends_once(host: EngineHost) -> None:
    host.handle(add(1, "fine"))
    host.handle(add(2, "fine", "no-such-adapter"))
    host.handle(add(3, fake_core.FAIL))
    host.handle(add(4, "one too many"))
    told = turn_until_idle(host)
    assert sorted(final_ids(told)) == [1, 2, 3, 4]
    kinds = {update.request_id: update.error_kind for update in updates(told)}
    assert kinds == {1: None, 2: "UnknownModelError", 3: "StepFailedError", 4: "OverloadedError"}


def test_a_silent_request_lets_the_host_rest_until_it_is_aborted(host: EngineHost) -> None:
    host.handle(add(1, fake_core.SILENT))
    assert final_ids(turn_until_idle(host)) == []
    host.handle(AbortRequests((1, 1, 99)))
    assert final_ids(turn_until_idle(host)) == [1]


def test_who_asks_for_files_that_are_being_read_is_held(host: EngineHost, assembly: FakeAssembly) -> None:
    assembly.adapters.paths["a"] = "/"
    assembly.adapters.unread.add("a")
    for request_id in (1, 2):
        host.handle(add(request_id, "fine", "a"))
    host.handle(add(3, "fine"))
    told = turn_until_idle(host)
    assert final_ids(told) == [3]
    (last,) = [one for one in told if isinstance(one, StepOutputs)][-1:]
    assert last.load.num_waiting == 2
    host.handle(ReportStats())
    turn_until_idle(host)
    assert [message.request_id for message in assembly.core.held] == [1, 2]
    host.handle(AbortRequests((2, 99)))
    assert final_ids(turn_until_idle(host)) == [2]
    assembly.adapters.unread.clear()
    host.handle(ReportStats())  # as the manager's descriptor would
    assert final_ids(turn_until_idle(host)) == [1]


def test_how_long_things_take_is_told_when_asked(host: EngineHost) -> None:
    assert MACHINE not in turn_until_idle(host)
    host.handle(ReportMachine())
    host.handle(ReportMachine())
    assert turn_until_idle(host).count(MACHINE) == 1
    assert MACHINE not in turn_until_idle(host)


def test_an_adapter_that_is_gone_when_its_turn_comes_refuses_who_was_held(
    host: EngineHost, assembly: FakeAssembly
) -> None:
    assembly.adapters.unread.add("a")
    host.handle(add(1, "fine", "a"))
    turn_until_idle(host)
    assembly.adapters.unread.clear()
    host.handle(ReportStats())
    (update,) = updates(turn_until_idle(host))
    assert update.error_kind == "UnknownModelError"


def test_nobody_is_held_for_longer_than_requests_may_wait() -> None:
    now_s = 0.0
    assembly = FakeAssembly(EngineConfig(model="fake", max_queue_s=5.0))
    host = EngineHost(assembly, clock=lambda: now_s)
    assembly.adapters.unread.add("a")
    for request_id, now_s in ((1, 10.0), (2, 11.0)):  # noqa: B007
        host.handle(add(request_id, "fine", "a"))
    assert final_ids(turn_until_idle(host)) == []
    assert host.wake_at_s() == 15.0
    now_s = 15.5
    host.handle(ReportStats())  # or the loop wakes
    (refused,) = updates(turn_until_idle(host))
    assert (refused.request_id, refused.error_kind) == (1, "OverloadedError")
    assert host.wake_at_s() == 16.0


def test_the_end_of_the_engine_ends_who_is_held(host: EngineHost, assembly: FakeAssembly) -> None:
    assembly.adapters.unread.add("a")
    host.handle(add(1, "fine", "a"))
    turn_until_idle(host)
    assert final_ids([host.end_all(EngineDeadError("over"))]) == [1]


def test_the_end_of_the_engine_ends_what_is_open(host: EngineHost) -> None:
    host.handle(add(1, "fine"))
    turn_until_idle(host)
    host.handle(add(2, fake_core.SILENT))
    turn_until_idle(host)
    ended = host.end_all(EngineDeadError("over"))
    assert final_ids([ended]) == [2]
    assert final_ids([host.end_all(EngineDeadError("over"))]) == []


def test_statistics_are_told_to_who_asks(host: EngineHost) -> None:
    turn_until_idle(host)
    for _ in range(2):
        host.handle(ReportStats())
        (told,) = turn_until_idle(host)
        assert isinstance(told, StepOutputs)
        assert told.updates == ()
    host.handle(AbortRequests((99,)))
    assert turn_until_idle(host) == []


def test_operations_end_once_and_adapters_are_told_first(host: EngineHost) -> None:
    turn_until_idle(host)
    host.handle(AddAdapter(1, "a", "/"))
    host.handle(AddAdapter(2, "b", "/no/such/directory"))
    host.handle(RemoveAdapter(3, "c"))
    host.handle(RemoveAdapter(4, "a"))
    told = turn_until_idle(host)
    done = [one for one in told if isinstance(one, OperationDone)]
    assert {one.operation_id: one.error_kind for one in done} == {
        1: None,
        2: "AdapterError",
        3: "UnknownModelError",
        4: None,
    }
    lists = [one.adapters for one in told if isinstance(one, AdaptersChanged)]
    assert [[info.name for info in infos] for infos in lists] == [["a"], []]
    assert told.index(AdaptersChanged(lists[0])) < told.index(OperationDone(1))


def test_requests_that_were_taken_in_are_counted(host: EngineHost) -> None:
    turn_until_idle(host)
    host.handle(add(1, fake_core.SILENT))
    host.handle(add(2, "fine"))
    told = [one for one in turn_until_idle(host) if isinstance(one, StepOutputs)]
    assert {one.num_requests for one in told} == {2}
    host.handle(AbortRequests((1,)))
    host.handle(add(3, fake_core.SILENT))  # as many as before are open
    (told_last,) = turn_until_idle(host)
    assert isinstance(told_last, StepOutputs)
    assert told_last.num_requests == 3


def test_gauges_are_told_at_most_ten_times_a_second_but_when_asked_and_at_rest() -> None:
    now_s = 0.0
    host = EngineHost(FakeAssembly(EngineConfig(model="fake")), clock=lambda: now_s)

    def tells() -> bool:
        told = host.turn()
        return any(isinstance(one, StepOutputs) and one.stats is not None for one in told)

    host.handle(add(1, "a long answer to it"))
    assert tells()
    for _ in range(4):
        now_s += 0.02
        assert not tells()
        assert host.wake_at_s() == 0.1
    host.handle(ReportStats())
    assert tells()
    now_s += 0.11
    assert tells()
    assert not tells()
    host.handle(AbortRequests((1,)))
    assert tells()
    assert host.wake_at_s() is None


def test_a_request_is_held_until_its_grammar_is_compiled(host: EngineHost, assembly: FakeAssembly) -> None:
    structured = StructuredOutput("regex", "a+")
    params = SamplingParams(seed=0, max_tokens=4, structured_output=structured)
    assembly.grammars.compiling.add(structured)
    host.handle(AddRequests(tuple(AddRequest(one, (97,), params) for one in (1, 2, 3))))
    host.handle(add(4, "ab"))
    assert final_ids(turn_until_idle(host)) == [4]  # the others do not wait
    host.handle(AbortRequests((2,)))
    (aborted,) = updates(turn_until_idle(host))
    assert (aborted.request_id, aborted.finish_reason) == (2, "abort")
    assembly.grammars.compiling.clear()
    assert set(final_ids(host.turn() + turn_until_idle(host))) == {1, 3}


def test_a_grammar_that_cannot_be_served_ends_its_request_alone(
    host: EngineHost, assembly: FakeAssembly
) -> None:
    assembly.grammars.error = RequestError("no such regex", param="structured_output")
    params = SamplingParams(max_tokens=4, structured_output=StructuredOutput("regex", "a+"))
    host.handle(AddRequests((AddRequest(1, (97,), params),)))
    host.handle(add(2, "ab"))
    told = updates(turn_until_idle(host))
    assert [one.error for one in told if one.request_id == 1] == ["no such regex"]
    assert told[-1].request_id == 2 and told[-1].finish_reason != "error"

"""The latency executor against closed forms: all times are exact and computed by hand."""

from dataclasses import replace

import pytest
from corun.profiles.link import Direction, LinkStats
from corun.profiles.models import LinkModel
from corun.runtime.plan import (
    AdapterTransfer,
    HostPlace,
    HostPlaceId,
    Outcome,
    Result,
    RowResult,
    StepId,
    StepResult,
    TransferId,
    TransferProgress,
    TransferRead,
    TransferResult,
    WorkersChanged,
)
from corun.runtime.sim.executor import END_TOKEN, ORDINARY_TOKEN
from corun.runtime.sim.machines import Factors, slowed
from support.simulation import MODEL, DrivenExecutor, copy_kv, load, request, row

NO_LATENCY = replace(MODEL, link=LinkModel(1000.0, 0.0), host_step_s=0.0)


def progress(number: int) -> TransferProgress:
    return TransferProgress(TransferId(number), 1)


def arrived(number: int) -> TransferResult:
    return TransferResult(TransferId(number))


def stepped(step: int, *tokens: tuple[int, int]) -> StepResult:
    rows = tuple(RowResult(key, Outcome.TOKENS, (token,)) for key, token in tokens)  # type: ignore[arg-type]
    return StepResult(StepId(step), rows)


def without_workers(results: list[tuple[float, Result]]) -> list[tuple[float, Result]]:
    return [told for told in results if not isinstance(told[1], WorkersChanged)]


def test_one_request_takes_what_its_steps_take_and_ends_at_its_length() -> None:
    driven = DrivenExecutor()
    driven.submit(row(1, 0, 4, samples=False), new=(request(1, 7),))
    assert driven.results(5.0) == [(0.0, WorkersChanged(1)), (4.5, stepped(1))]
    driven.submit(row(1, 4, 3))
    assert driven.results(10.0) == [(8.5, stepped(2, (1, ORDINARY_TOKEN)))]
    driven.submit(row(1, 7, 1))
    driven.submit(row(1, 8, 1))  # begins when the one before it has ended
    assert driven.results(20.0) == [
        (11.5, stepped(3, (1, ORDINARY_TOKEN))),
        (13.0, stepped(4, (1, END_TOKEN))),
    ]


def test_who_computes_a_position_again_gets_its_token_again() -> None:
    driven = DrivenExecutor(output_tokens=2)
    driven.submit(row(1, 0, 4), new=(request(1, 4),))
    driven.submit(row(1, 4, 1))
    driven.submit(row(1, 0, 5))  # all of it, after it has been preempted
    tokens = [one.rows[0].token_ids for _, one in driven.results() if isinstance(one, StepResult)]
    assert tokens == [(ORDINARY_TOKEN,), (END_TOKEN,), (END_TOKEN,)]


def test_a_plan_without_rows_ends_at_once() -> None:
    driven = DrivenExecutor()
    driven.submit()
    assert without_workers(driven.results(1.0)) == [(0.0, stepped(1))]
    assert driven.clock() == 1.0  # nothing else happens: it has waited


def test_the_engine_takes_its_time_for_turns_rows_requests_and_loads() -> None:
    model = replace(NO_LATENCY, turn_s=1.0, turn_row_s=0.5, request_s=2.0, load_s=4.0)
    driven = DrivenExecutor(model)
    driven.submit(row(1, 0, 4), new=(request(1, 4),))
    assert driven.results(10.0)[-1] == (2.0 + 1.5 + 4.0, stepped(1, (1, ORDINARY_TOKEN)))
    driven.submit(transfers=(load(1),))  # that moves while the engine goes on
    assert driven.results(13.0) == [(11.0, progress(1)), (12.0, arrived(1))]
    assert driven.results(20.0) == [(14.0, stepped(2))]
    driven = DrivenExecutor(slowed(model, Factors(step=2.0)))
    driven.submit(row(1, 0, 4), new=(request(1, 4),), transfers=(load(1),))
    ends_s = [at_s for at_s, one in driven.results() if isinstance(one, StepResult)]
    assert ends_s == [2 * (2.0 + 4.0 + 1.5 + 4.0)]


def test_two_loads_follow_each_other_and_report_their_groups() -> None:
    driven = DrivenExecutor()
    driven.submit(transfers=(load(1),))
    driven.results(1.0)
    driven.submit(transfers=(load(2),))
    # 1 has 1000 of 2000 bytes on the way when 2 begins, which waits for the others.
    assert driven.results() == [
        (1.0, stepped(2)),
        (1.5, progress(1)),
        (2.5, arrived(1)),
        (3.5, progress(2)),
        (4.5, arrived(2)),
    ]
    assert driven.executor.link_stats(Direction.TO_DEVICE) == LinkStats(4000, 4.0, 0)
    assert driven.executor.link_stats(Direction.TO_HOST) == LinkStats(0, 0.0, 0)


def test_a_load_overtakes_another_one_where_the_plan_says_so() -> None:
    driven = DrivenExecutor()
    driven.submit(transfers=(load(1), load(2)))
    driven.results(0.5)
    driven.submit(transfers=(load(3),), order=(3, 2, 1))
    # 1 keeps the 500 bytes that it has got.
    assert driven.results() == [
        (0.5, stepped(2)),
        (2.0, progress(3)),
        (3.0, arrived(3)),
        (4.0, progress(2)),
        (5.0, arrived(2)),
        (5.5, progress(1)),
        (6.5, arrived(1)),
    ]


def test_a_prefetch_has_the_link_while_nobody_waits_for_a_load() -> None:
    driven = DrivenExecutor()
    driven.submit(transfers=(load(1, is_demand=False),))
    driven.results(0.5)
    driven.submit(transfers=(load(2),))
    assert driven.results(2.25) == [(0.5, stepped(2)), (2.0, progress(2))]
    driven.submit(promoted=(1,))
    # At 2.25 s number 2 has 250 bytes left, number 1 500 to its first group and 1500 in all.
    assert driven.results() == [(2.25, stepped(3)), (3.0, arrived(2)), (3.5, progress(1)), (4.5, arrived(1))]


def test_kv_goes_both_ways_at_once() -> None:
    driven = DrivenExecutor()
    out, back = copy_kv(1, Direction.TO_HOST, 5), copy_kv(2, Direction.TO_DEVICE, 10)
    driven.submit(transfers=(out, back))
    # 2000 and 4000 bytes, each alone in its direction, and half a second of latency.
    assert without_workers(driven.results()) == [(0.0, stepped(1)), (2.5, arrived(1)), (4.5, arrived(2))]
    assert driven.executor.link_stats(Direction.TO_HOST) == LinkStats(2000, 2.0, 0)
    assert driven.executor.link_stats(Direction.TO_DEVICE) == LinkStats(4000, 4.0, 0)


def test_kv_shares_the_link_with_a_load_in_its_direction() -> None:
    driven = DrivenExecutor()
    driven.submit(transfers=(load(1), copy_kv(2, Direction.TO_DEVICE, 5), copy_kv(3, Direction.TO_HOST, 5)))
    # 2000 bytes each at half the link's speed; of the load, half of them are a layer group.
    assert without_workers(driven.results()) == [
        (0.0, stepped(1)),
        (2.5, progress(1)),
        (2.5, arrived(3)),
        (4.5, arrived(1)),
        (4.5, arrived(2)),
    ]


def test_a_prefetch_of_kv_gives_way_until_a_request_waits_for_it() -> None:
    driven = DrivenExecutor()
    driven.submit(transfers=(copy_kv(1, Direction.TO_DEVICE, 5, is_demand=False),))
    driven.results(1.0)
    driven.submit(transfers=(copy_kv(2, Direction.TO_DEVICE, 5),))
    driven.results(2.0)
    driven.submit(promoted=(1, 3))
    # Each has 1000 bytes left at 2 s.
    assert driven.results() == [(2.0, stepped(3)), (4.5, arrived(1)), (4.5, arrived(2))]


def from_files(number: int, *, is_demand: bool = True) -> AdapterTransfer:
    place = HostPlace(HostPlaceId(number), ((0, 4096), (4096, 4096)), is_filled=False)
    return replace(load(number, is_demand=is_demand), host=place)


def test_files_are_read_one_after_the_other_and_prefetches_give_way() -> None:
    driven = DrivenExecutor()
    driven.submit(transfers=(from_files(1, is_demand=False),))
    driven.results(1.0)
    driven.submit(transfers=(from_files(2, is_demand=True),))

    def read(number: int, num_groups: int) -> TransferRead:
        return TransferRead(TransferId(number), num_groups, 2.0 * num_groups)

    # A group takes 2 s to read and 1.5 s to copy. 1's first was being read when 2 came.
    assert driven.results() == [
        (1.0, stepped(2)),
        (2.0, read(1, 1)),
        (3.5, progress(1)),
        (4.0, read(2, 1)),
        (5.5, progress(2)),
        (6.0, read(2, 2)),
        (7.5, arrived(2)),
        (8.0, read(1, 2)),
        (9.5, arrived(1)),
    ]


@pytest.mark.parametrize(
    ("split_layer", "end_s", "end_from_files_s"),
    [
        # Layers wait for their groups, which come at 1 and 2 s: 1 + 2, then 2. Files are read in 2 s
        # each, so that groups come at 3 and 5 s.
        (0, 5.0, 7.0),
        # The first one's deltas take 4 s on a core, of which 0.4 s hide under the base products,
        # and 0.25 s to exchange.
        (1, 2.0 + 0.25 + 3.6 + 2.0, 2.0 + 5.85 + 2.0),
        (2, 2 * (2.0 + 0.25 + 3.6), 2.0 + 2 * 5.85),
    ],
)
@pytest.mark.parametrize("is_from_files", [False, True])
def test_an_assisted_row_takes_what_the_planner_says(
    split_layer: int, end_s: float, end_from_files_s: float, is_from_files: bool
) -> None:
    driven = DrivenExecutor(NO_LATENCY)
    transfer = from_files(1) if is_from_files else load(1)
    driven.submit(
        row(1, 0, 4, split_layer=split_layer), new=(request(1, 4, adapter=1),), transfers=(transfer,)
    )
    ((ended_s, result),) = [told for told in driven.results() if isinstance(told[1], StepResult)]
    assert ended_s == pytest.approx(end_from_files_s if is_from_files else end_s)
    assert result == stepped(1, (1, ORDINARY_TOKEN))


def test_factors_slow_what_they_name() -> None:
    def end_s(factors: Factors, split_layer: int) -> float:
        driven = DrivenExecutor(slowed(NO_LATENCY, factors))
        driven.submit(
            row(1, 0, 4, split_layer=split_layer), new=(request(1, 4, adapter=1),), transfers=(load(1),)
        )
        return next(time_s for time_s, one in driven.results() if isinstance(one, StepResult))

    assert end_s(Factors(step=2.0), 0) == pytest.approx(1.0 + 4.0 + 4.0)
    assert end_s(Factors(link=4.0), 0) == pytest.approx(8.0 + 2.0)
    assert end_s(Factors(workers=2.0), 2) == pytest.approx(2 * (2.0 + 0.5 + 7.6))


def test_an_assisted_row_with_everything_there_takes_as_long_as_any_other() -> None:
    ends = []
    for batch in (row(1, 0, 4), row(1, 0, 4, split_layer=0)):
        driven = DrivenExecutor()
        driven.submit(transfers=(load(1),))
        driven.results(10.0)
        driven.submit(batch, new=(request(1, 4, adapter=1),))
        ends += driven.results()
    assert ends[0] == ends[1] == (14.5, stepped(2, (1, ORDINARY_TOKEN)))


def test_a_load_that_begins_during_a_step_delays_the_rows_that_wait_for_another() -> None:
    driven = DrivenExecutor(NO_LATENCY)
    driven.submit(row(1, 0, 1, split_layer=0), new=(request(1, 1, adapter=1),), transfers=(load(1),))
    driven.results(1.0)
    driven.submit(transfers=(load(2),), order=(2, 1))
    # The second layer's group comes at 4 s instead of 2 and takes half a second.
    steps = [told for told in driven.results() if isinstance(told[1], StepResult)]
    assert steps == [(4.5, stepped(1, (1, ORDINARY_TOKEN))), (4.5, stepped(2))]


def test_a_load_that_has_ended_has_still_held_up_the_step_that_began_before() -> None:
    driven = DrivenExecutor(NO_LATENCY)
    driven.submit(row(1, 0, 4, split_layer=0), new=(request(1, 4, adapter=1),), transfers=(load(1),))
    driven.results(3.0)
    driven.submit(transfers=(load(2),))
    steps = [told for told in driven.results() if isinstance(told[1], StepResult)]
    assert steps == [(5.0, stepped(1, (1, ORDINARY_TOKEN))), (5.0, stepped(2))]


def test_a_request_is_forgotten_when_no_step_has_its_rows() -> None:
    driven = DrivenExecutor(NO_LATENCY, output_tokens=1)
    driven.submit(row(1, 0, 4), new=(request(1, 4),))
    driven.submit(row(1, 4, 1))
    driven.results(4.0)  # the request has ended, and is in the next step
    driven.submit(transfers=(load(1),), forget=(1,))
    assert [time_s for time_s, one in driven.results() if isinstance(one, StepResult)] == [5.0, 5.0]
    driven.submit(new=(request(1, 4),))  # it is not known any more


def test_rows_without_their_adapter_are_refused() -> None:
    driven = DrivenExecutor()
    with pytest.raises(AssertionError, match="not there"):
        driven.submit(row(1, 0, 1), new=(request(1, 1, adapter=1),))
    driven = DrivenExecutor()
    with pytest.raises(AssertionError, match="not there"):
        driven.submit(row(1, 0, 1), new=(request(1, 1, adapter=1),), transfers=(load(1),))
    driven = DrivenExecutor()
    with pytest.raises(AssertionError, match="not there"):
        driven.submit(row(1, 0, 1, split_layer=1), new=(request(1, 1, adapter=1),))


def test_evictions_are_done_at_once_and_spare_what_steps_use() -> None:
    driven = DrivenExecutor()
    driven.submit(transfers=(load(1),))
    driven.results(10.0)
    driven.submit(row(1, 0, 2), new=(request(1, 1, adapter=1),))
    with pytest.raises(AssertionError, match="while a step uses it"):
        driven.submit(evict=(1,))
    driven.results(20.0)
    driven = DrivenExecutor()
    driven.submit(transfers=(load(1),))
    driven.results(10.0)
    driven.submit(evict=(1,), transfers=(load(2),))
    assert driven.results(11.0) == [(10.0, stepped(2))]
    with pytest.raises(AssertionError, match="not there"):
        driven.submit(evict=(1,))


def test_a_closed_executor_can_be_closed_again() -> None:
    driven = DrivenExecutor()
    assert driven.executor.fileno() >= 0
    driven.executor.close()
    driven.executor.close()

"""A view is the server's last report and the requests sent since."""

import pytest
from corun.runtime.sim.papers.machines import MACHINES
from support.routing import request_of, server_costs, server_report, servers_of


def test_what_is_sent_counts_until_a_report_has_it() -> None:
    (view,) = servers_of(server_report(num_running_by_rank={8: 2}, disk_adapters={"r16", "r64"}))
    assert view.load.num_requests == 2
    view.assign(request_of(16), 1.0)
    view.assign(request_of(64), 2.0)
    assert view.load.num_requests == 4
    assert view.load.queued_tokens == 200
    assert view.load.largest_bytes == request_of(64).num_bytes
    view.apply(server_report(reported_s=1.5, num_running_by_rank={8: 2, 16: 1}))
    assert view.load.num_requests == 4  # the second request is not in the report
    view.apply(server_report(reported_s=2.0, num_running_by_rank={8: 2, 16: 1, 64: 1}))
    assert view.load.num_requests == 4
    assert view.load.queued_tokens == 0


def test_an_adapter_of_a_request_that_was_sent_is_on_its_way() -> None:
    (view,) = servers_of(server_report(gpu_adapters={"r8"}, disk_adapters={"r8", "r16"}))
    assert view.tiers == {"r8": 0, "r16": 2}
    view.assign(request_of(8), 1.0)
    view.assign(request_of(16), 1.0)
    view.assign(request_of(64), 1.0)
    view.assign(request_of(), 1.0)
    assert view.tiers == {"r8": 0, "r16": 1, "r64": 1}


def test_steps_are_those_of_the_model() -> None:
    """10 ms and, exact, 1 us per rank of all rows; padded, of the largest for each."""
    report = server_report(num_running_by_rank={0: 1, 8: 2}, num_waiting_by_rank={64: 1})
    (exact,) = servers_of(report)
    (padded,) = servers_of(report, costs=server_costs(is_padded=True))
    assert exact.load.step_s == pytest.approx(10e-3 + 80e-6)
    assert padded.load.step_s == pytest.approx(10e-3 + 4 * 64e-6)


def test_chunks_of_prompts_have_steps_of_their_own_where_decoding_has() -> None:
    """Toppings, figure 4: 28.7 ms and 59.9 us per token; decoding does not make it longer."""
    machine = MACHINES["a100-llama2-7b"]
    costs = server_costs(model=machine.model, max_num_batched_tokens=2048, mix_decode_with_prefill=False)
    report = server_report(num_running_by_rank={0: 30}, queued_prefill_tokens=2048)
    (view,) = servers_of(report, costs=costs)
    assert view.load.step_s == pytest.approx(31.8e-3)
    assert view.load.busy_until_s == pytest.approx(28.7e-3 + 2048 * 59.9e-6)


def test_the_queue_is_worked_off_while_nothing_is_reported() -> None:
    """1,000 tokens in one step take 110 ms; what comes when it is done begins at once."""
    report = server_report(reported_s=1.0, queued_prefill_tokens=1000)
    (view,) = servers_of(report)
    assert view.load.busy_until_s == pytest.approx(1.11)
    view.assign(request_of(num_prompt_tokens=1000), 1.05)
    assert view.load.busy_until_s == pytest.approx(1.22)
    view.assign(request_of(num_prompt_tokens=1000), 2.0)
    assert view.load.busy_until_s == pytest.approx(2.11)


def test_a_report_may_say_itself_what_it_lacks() -> None:
    (view,) = servers_of(server_report())
    numbers = [view.assign(request_of(), 1.0) for _ in range(4)]
    assert numbers == [1, 2, 3, 4]
    view.apply(server_report(reported_s=9.0, num_running_by_rank={0: 2}), lambda one: one in (2, 4))
    assert view.load.num_requests == 4 and view.load.queued_tokens == 200
    view.withdraw(2)  # failed
    view.withdraw(3)  # in the report
    assert view.load.num_requests == 3 and view.load.queued_tokens == 100


def test_a_view_with_other_costs_is_another_one_that_has_been_sent_the_same() -> None:
    (view,) = servers_of(server_report(gpu_adapters={"r8"}))
    view.assign(request_of(8), 1.0)
    other = view.with_costs(server_costs(is_padded=True))
    assert other != view and other.load.num_requests == 1 and other.tiers == {"r8": 0}
    assert other.assign(request_of(8), 2.0) == 2 and view.load.num_requests == 1

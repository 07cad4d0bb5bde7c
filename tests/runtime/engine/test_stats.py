"""Statistics of an engine: bytes add up to the memory, and each copy is counted once."""

import msgspec
import pytest
from corun.runtime.adapter import AdapterFacts
from corun.runtime.engine.messages import EngineStats, LinkUsage
from corun.runtime.engine.stats import CpuStats, OpenWork, StepCounts, engine_stats, machine_report
from corun.runtime.memory.host_cache import HostCache
from corun.runtime.plan import AdapterId, KvTransfer, TransferResult
from corun.runtime.scheduler.registry import SCHEDULER_POLICIES, make_policy
from corun.runtime.scheduler.scheduler import Scheduler
from corun.runtime.scheduler.step_times import LearnedTimes
from support.kept_prefixes import keep, load
from support.profiles import PROFILE
from support.scheduling import (
    BLOCK_BYTES,
    BLOCK_SIZE,
    make_memory,
    make_request,
    make_scheduler,
    policy_facts,
)


def stats_of(scheduler: Scheduler, now_s: float = 0.0) -> EngineStats:
    steps = StepCounts()
    steps.add(5)
    return engine_stats(
        scheduler,
        lambda ids: tuple(map(str, ids)),
        steps=steps,
        cpu=CpuStats(),
        work=OpenWork(scheduler),
        now_s=now_s,
    )


def test_bytes_of_the_device_add_up_to_its_memory() -> None:
    memory = make_memory(num_blocks=8, keeps_prefixes=True)
    scheduler = make_scheduler(memory=memory)
    load(memory, 1, 100)
    keep(memory, 7, 2)
    scheduler.add_request(make_request(1, prompt=(1,) * 5, max_tokens=8), 0.0)
    scheduler.schedule(0.0)
    levels = stats_of(scheduler).memory_bytes
    assert levels.keys() == {"device"}
    device = dict(levels["device"])
    assert device.pop("reserved") == BLOCK_BYTES
    assert device == {
        "running_kv": 2 * BLOCK_BYTES,
        "history_kv": 2 * BLOCK_BYTES,
        "adapters": 100,
        "free": 4 * BLOCK_BYTES - 100,
    }


def test_what_the_host_holds() -> None:
    memory = make_memory(num_blocks=8, keeps_prefixes=True, num_host_slots=4)
    scheduler = make_scheduler(memory=memory)
    keep(memory, 7, 8)
    (copy,) = memory.commands(1.0).transfers
    assert isinstance(copy, KvTransfer)
    num_bytes = len(copy.block_ids) * BLOCK_BYTES
    assert stats_of(scheduler, 1.5).link == (LinkUsage("to_host", "kv", 0, 0.5),)
    memory.end_transfer(TransferResult(copy.transfer_id), 2.0)
    stats = stats_of(scheduler, 9.0)
    free_bytes = 4 * BLOCK_BYTES - num_bytes
    assert stats.memory_bytes["host"] == {"history_kv": num_bytes, "free": free_bytes}
    assert stats.link == (LinkUsage("to_host", "kv", num_bytes, 1.0),)


def test_adapters_that_are_read_in_place_do_not_move() -> None:
    host = HostCache(1 << 20, is_device_memory=True)
    memory = make_memory(num_blocks=64, host=host)
    adapter = AdapterFacts("content", 8, 100, host_bytes=(4096,))
    memory.loads.begin(AdapterId(1), adapter, 0.0)
    (transfer,) = memory.transfers.take_commands()
    memory.end_transfer(TransferResult(transfer.transfer_id), 1.0)
    stats = stats_of(make_scheduler(memory=memory))
    assert stats.link == ()
    assert stats.memory_bytes["host"] == {"adapters": 4096}


def test_the_bound_of_steps_that_decode_is_told() -> None:
    scheduler = make_scheduler()
    assert stats_of(scheduler).decode_gap_bound_s == 0.0
    scheduler.decode_gap.bound_s = 0.25
    assert stats_of(scheduler).decode_gap_bound_s == 0.25


@pytest.mark.parametrize("name", SCHEDULER_POLICIES)
def test_what_a_policy_counts_goes_through_a_channel(name: str) -> None:
    scheduler = make_scheduler(policy=make_policy(name, policy_facts()))
    for number in range(1, 70):  # until queues are cut
        scheduler.add_request(make_request(number), float(number))
    scheduler.schedule(70.0)
    stats = stats_of(scheduler)
    read = msgspec.msgpack.decode(msgspec.msgpack.encode(stats), type=EngineStats)
    assert read == stats
    assert bool(read.policy_counts) == (name in ("chameleon", "chameleon-paper", "output-only"))


def test_how_long_things_take_is_measured_or_learned() -> None:
    times = LearnedTimes(16)
    times.step_ended(10, 0.5)
    scheduler = make_scheduler(times=times)
    learned = machine_report(scheduler, None)
    assert not learned.is_measured
    assert learned.machine.step_s.at(10) == 0.5
    assert learned.kv_bytes_per_token == BLOCK_BYTES // BLOCK_SIZE
    measured = machine_report(scheduler, PROFILE.model)
    assert measured.is_measured
    assert measured.machine is PROFILE.model

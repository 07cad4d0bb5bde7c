"""What does it cost to report where adapters are? The share of the engine's time, for 2,000.

The engine's core and loop over a simulated machine that always computes, on virtual time. Requests
are spread evenly over the adapters, and device and host have room for few of them, so more than 50
times per second an adapter moves to another level. Measured is the processor time of ten reports
per second: to find changes, to read them and the gauges, and to encode the messages. The time to
look at all adapters is measured for comparison. The last line is JSON.

    python bench/residency.py [--seconds 120]
"""

import argparse
import contextlib
import itertools
import random
import statistics
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from types import SimpleNamespace

from corun.runtime.adapter import AdapterFacts, AdapterOutline
from corun.runtime.adapters.content import AdapterContent
from corun.runtime.adapters.registry import AdapterVersion
from corun.runtime.adapters.resolved import AdapterPath
from corun.runtime.engine.adapter_manager import AdapterManager
from corun.runtime.engine.adapter_reading import MakeRoom
from corun.runtime.engine.channel import encode_frame
from corun.runtime.engine.core import CoreConfig, EngineCore
from corun.runtime.engine.host import EngineHost
from corun.runtime.engine.messages import AdaptersChanged, AddRequest, AddRequests, StepOutputs
from corun.runtime.frontend.inputs import LoraDirectory
from corun.runtime.memory.host_cache import HostCache
from corun.runtime.memory.make import MemorySizes, make_device_memory
from corun.runtime.memory.reload_cost import ReloadCosts
from corun.runtime.plan import HostPlaceId, RequestId
from corun.runtime.sampling import SamplingParams
from corun.runtime.scheduler.limits import SchedulerConfig
from corun.runtime.scheduler.policy import PolicyFacts
from corun.runtime.scheduler.registry import make_policy
from corun.runtime.scheduler.scheduler import Scheduler
from corun.runtime.scheduler.step_times import ProfiledTimes
from corun.runtime.sim.clock import VirtualClock
from corun.runtime.sim.executor import END_TOKEN, LatencyExecutor
from corun.runtime.sim.machines import SimulatedMachine
from corun.runtime.sim.papers.machines import MACHINES
from paired import report
from part_clock import PartClock

MAX_SHARE = 0.02
MIN_CHANGES_PER_S = 50.0  # of levels; what comes and goes between two beats is not among them

_TURN_S = 0.005  # how often the loop comes by, of steps that take seven times as long
WARM_UP_S = 10.0
_NUM_LOOKS = 20


@dataclass(frozen=True)
class Load:
    """Frozen: figures of two runs compare only if these agree."""

    machine: str = "a40-llama8b"
    adapters: int = 2000
    rank: int = 8
    device_adapters: int = 200  # that its memory would hold without KV
    host_adapters: int = 1000
    requests_per_s: float = 24.0
    prompt_tokens: int = 64
    output_tokens: int = 32
    seconds: float = 120.0
    seed: int = 0


class _NoArena:
    """The host's memory is an account alone."""

    def evict(self, place_ids: Iterable[HostPlaceId]) -> None:
        """Nothing is there."""

    def remove_content(self, digest: str) -> None:
        """Nothing is known."""


@dataclass
class Reports:
    """The reports, and the time that they took."""

    beats_s: list[float] = field(default_factory=list)  # processor seconds of each
    own_s: dict[str, float] = field(default_factory=dict)  # by part, of other turns too
    num_reported: int = 0  # adapters
    num_changes: int = 0  # of levels
    num_bytes: int = 0


class Engine:
    """An engine, its requests, and a front end that receives the reports."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._rng = random.Random(load.seed)
        self._clock = VirtualClock()
        self._machine = MACHINES[load.machine]
        device_bytes = load.device_adapters * self._facts("").num_bytes
        self._machine = replace(self._machine, memory_bytes=device_bytes)
        self.manager = AdapterManager(self, (), _NoArena())
        num_requests = int(2 * load.requests_per_s * (load.seconds + WARM_UP_S))
        self._executor = LatencyExecutor(
            self._machine,
            dict.fromkeys(map(RequestId, range(num_requests)), load.output_tokens),
            lambda adapter_id: self.manager.version(adapter_id).facts,
            clock=self._clock,
            sleep=self._clock.sleep,
        )
        self._scheduler = _make_scheduler(self._machine, load.host_adapters * self._host_bytes)
        self._core = EngineCore(
            self._scheduler,
            self._executor,
            self.manager,
            CoreConfig(base_fingerprint="none", dtype="simulated"),
            clock=self._clock,
            on_adapter_gone=self.manager.remove_version,
        )
        self.manager.attach(self._core)
        for number in range(load.adapters):
            self.manager.add_now(_name(number), f"/adapters/{number}")
        self._mirror = LoraDirectory(self.manager.infos())
        info = SimpleNamespace(max_queue_s=None)  # all that a host looks at
        grammars = SimpleNamespace(must_wait=lambda structured: False)  # no request has one
        assembly = SimpleNamespace(core=self._core, adapters=self.manager, info=info, grammars=grammars)
        self._host = EngineHost(assembly, clock=self._clock)
        self.encode = encode_frame
        self._request_ids = itertools.count(1)
        self._next_arrival_s = 0.0

    def close(self) -> None:
        self.manager.close()
        self._executor.close()

    def run(self, duration_s: float) -> Reports:
        """Serve for so many virtual seconds."""
        reports = Reports()
        clock = PartClock(time.thread_time)  # others may have the core
        end_s = self._clock() + duration_s
        parts = [
            ("adapters", self.manager, "poll"),
            ("gauges", self._core, "stats"),
            ("messages", self, "encode"),
        ]
        with clock.around(parts):
            while self._clock() < end_s:
                self._send_due()
                before_s = sum(clock.own_s.values())
                if self._receive(reports):
                    reports.beats_s.append(sum(clock.own_s.values()) - before_s)
                self._clock.sleep(_TURN_S)
        reports.own_s = dict(clock.own_s)
        return reports

    def look_at_all(self) -> float:
        """Processor seconds of reading where all adapters are."""
        began_s = time.thread_time()
        for _ in range(_NUM_LOOKS):
            self.manager.infos()
        return (time.thread_time() - began_s) / _NUM_LOOKS

    @property
    def _host_bytes(self) -> int:
        return sum(self._facts("").host_bytes)

    def _facts(self, path: str) -> AdapterFacts:
        return self._machine.adapter_facts(path, self._load.rank)

    def outline(self, path: AdapterPath) -> AdapterOutline:
        """Not used."""
        raise NotImplementedError

    def read(self, path: AdapterPath, make_room: MakeRoom, known: AdapterVersion | None) -> AdapterContent:
        facts = self._facts(str(path))
        is_kept = make_room(facts.host_bytes) is not None
        return AdapterContent(facts, is_kept=is_kept)

    def _send_due(self) -> None:
        while self._next_arrival_s <= self._clock():
            self._next_arrival_s += self._rng.expovariate(self._load.requests_per_s)
            number = next(self._request_ids)
            tokens = (2 + number,) * self._load.prompt_tokens
            adapter = _name(self._rng.randrange(self._load.adapters))
            sampling = SamplingParams(max_tokens=self._load.output_tokens)
            self._host.handle(AddRequests((AddRequest(number, tokens, sampling, adapter),)))

    def _receive(self, reports: Reports) -> bool:
        """Take a turn, and what it tells; whether that was a beat."""
        is_beat = False
        for message in self._host.turn():
            if isinstance(message, AdaptersChanged):
                reports.num_bytes += len(self.encode(message))
                self._apply(message, reports)
            elif isinstance(message, StepOutputs) and message.stats is not None:
                reports.num_bytes += len(self.encode(message.stats))
                is_beat = True
        return is_beat

    def _apply(self, message: AdaptersChanged, reports: Reports) -> None:
        reports.num_reported += len(message.adapters)
        for info in message.adapters:
            known = self._mirror.get(info.name)
            assert known is not None, info
            reports.num_changes += known.residency.level != info.residency.level
        self._mirror.update(message.adapters, message.removed)


def _name(number: int) -> str:
    return f"adapter-{number:04d}"


def _make_scheduler(machine: SimulatedMachine, host_bytes: int) -> Scheduler:
    config = SchedulerConfig(
        max_num_batched_tokens=machine.max_num_batched_tokens,
        max_num_seqs=machine.max_num_seqs,
        max_model_len=machine.num_blocks * machine.block_size,
        block_size=machine.block_size,
    )
    times = ProfiledTimes(machine.model, config.max_num_batched_tokens)
    facts = PolicyFacts(
        times=times, capacity_tokens=config.max_model_len, bytes_per_token=machine.kv_bytes_per_token
    )
    sizes = MemorySizes(
        capacity_bytes=machine.memory_bytes,
        num_blocks=machine.num_blocks,
        block_size=machine.block_size,
        block_bytes=machine.block_bytes,
        max_model_len=config.max_model_len,
    )
    costs = ReloadCosts(times, machine.block_size, config.max_num_batched_tokens, machine.model.link)
    memory = make_device_memory(sizes, "corun", costs, HostCache(host_bytes))
    return Scheduler(config, make_policy("corun", facts), memory, (END_TOKEN,), times=times)


def measure(load: Load) -> dict[str, float]:
    """Return the figures of one engine."""
    with contextlib.closing(Engine(load)) as engine:
        engine.run(WARM_UP_S)
        reports = engine.run(load.seconds)
        all_s = engine.look_at_all()
    beats_us = sorted(1e6 * one for one in reports.beats_s)
    shares = {part: own_s / load.seconds for part, own_s in reports.own_s.items()}
    return {
        "level_changes_per_s": reports.num_changes / load.seconds,
        "beats_per_s": len(beats_us) / load.seconds,
        "adapters_per_beat": reports.num_reported / len(beats_us),
        "bytes_per_beat": reports.num_bytes / len(beats_us),
        "beat_us": statistics.median(beats_us),
        "beat_us_p99": beats_us[int(0.99 * len(beats_us))],
        "all_adapters_us": 1e6 * all_s,
        "share": sum(shares.values()),
    } | {f"share_{part}": share for part, share in shares.items()}


def judge(figures: Mapping[str, float]) -> dict[str, bool]:
    """Say which bounds hold."""
    return {
        f"{MIN_CHANGES_PER_S:g} changes/s": figures["level_changes_per_s"] >= MIN_CHANGES_PER_S,
        f"{MAX_SHARE:.0%} of the engine's time": figures["share"] <= MAX_SHARE,
    }


def main() -> None:
    """Measure, print a line per figure, and the report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", maxsplit=1)[0])
    parser.add_argument("--seconds", type=float, default=Load.seconds, help="seconds of virtual time")
    load = Load(seconds=parser.parse_args().seconds)
    figures = measure(load)
    for name, value in figures.items():
        print(f"{name:22s} {value:10.4g}")
    report("residency", asdict(load), figures, dict(judge(figures)))


if __name__ == "__main__":
    main()

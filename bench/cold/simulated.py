"""For which adapters, prompts and links is co-execution? Simulated, on hand-set machines.

On machines like A10, A100 and H100, alone and beside eight requests that decode, a cold request
generates two tokens. The cost of a cell is the time until the second one plus the delays of the
requests beside it. The planner's choice is compared with every fixed strategy, which starts at once
at any cost, and with the best split that bytes, arithmetic and link allow. The picture: one machine,
link by rank by prompt, coloured by the best strategy.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from corun.profiles.models import LinkModel, MachineModel
from corun.profiles.step_time import NO_ROWS, RowCosts, forward_s, pass_s, row_costs
from corun.runtime.coldstart.planner import BY_PRICE, PlannerConfig
from corun.runtime.coldstart.strategy import LoadStrategy
from corun.runtime.sim.engine import SimulationOptions, simulate
from corun.runtime.sim.machines import SimulatedMachine
from corun.runtime.sim.papers.machines import MACHINES
from corun.runtime.sim.workloads import Workload, WorkloadRequest

MAX_REGRET = 1.03  # over the best fixed strategy
MAX_OVER_BEST = 1.10  # over the best split
_LEAST_OVER_BEST = 0.99  # below it the best split would not be the best
_NEAR_CACHED, _MAX_NEAR_CACHED = 1.05, 1.15
_MACHINES = ("a10-llama8b", "a100-llama8b", "h100-llama8b")
_FIXED = (LoadStrategy.ASYNC_LOAD, LoadStrategy.PIPELINED, LoadStrategy.ASSISTED)
_AT_ONCE = 1000.0  # a priority with which nothing waits for others
_SLOW_LINK_BYTES_PER_S = 3e9
_RANKS, _PROMPTS = (64, 256), (32, 256)
_RUNNING_RANK, _RUNNING_TOKENS, _ARRIVAL_S = 16, 150, 1.0
_RUNNING_KEYS = 100  # at the arrival, about
_DRAWN = "a100-llama8b"
_MAP_RANKS = (8, 16, 32, 64, 128, 256)
_MAP_PROMPTS = (32, 128, 512, 2048)
_MAP_LINKS_GB_PER_S = (1.0, 3.0, 6.0, 12.0, 25.0, 50.0)
_SAME = 1.02  # times within it count as equal: the simpler strategy is shown
_LEFT, _TOP, _WIDTH, _HEIGHT, _GAP = 60, 50, 34, 31, 16  # of the picture, in its units
_COLORS = {
    LoadStrategy.ASYNC_LOAD: "#d5b37a",
    LoadStrategy.PIPELINED: "#7aa6d5",
    LoadStrategy.ASSISTED: "#5aa469",
}
_NAMES = {
    LoadStrategy.ASYNC_LOAD: "waiting for the load",
    LoadStrategy.PIPELINED: "layer by layer",
    LoadStrategy.ASSISTED: "with workers",
}


@dataclass(frozen=True, slots=True)
class SimulatedCell:
    """A cold request of ``prompt_tokens`` beside ``num_running`` that decode."""

    machine: SimulatedMachine
    rank: int
    prompt_tokens: int
    num_running: int = 0

    @property
    def name(self) -> str:
        link = f"{self.machine.model.link.bytes_per_s / 1e9:g} GB/s"
        beside = f", beside {self.num_running}" if self.num_running else ""
        return f"{self.machine.name}, {link}, rank {self.rank}, {self.prompt_tokens} tokens{beside}"


@dataclass(frozen=True, slots=True)
class Chunk:
    """A chunk of a cold request whose deltas are spread over all workers; times in seconds."""

    assisted_s: float  # of a layer with deltas of workers
    device_s: float  # of a layer with deltas of the device
    loaded_s: float  # of the step, with all rows in one pass, once the adapter is there

    @classmethod
    def of(
        cls,
        model: MachineModel,
        adapter_bytes: int,
        positions: range,
        floors_s: Sequence[float],
        beside: RowCosts = NO_ROWS,
    ) -> "Chunk":
        """``positions``: of its tokens; ``floors_s``: least time of each input group's deltas."""
        own, base = (
            row_costs(model, [len(positions)], [positions.start], [size]) for size in (adapter_bytes, 0)
        )
        exposed_s = model.assisted_pass_s / model.num_layers
        for group, floor_s in zip(model.groups, floors_s, strict=True):
            exposed_s += model.invoke_s(len(positions))
            exposed_s += max(0.0, floor_s - group.base_s.at(len(positions)))
        base_s, device_s = (
            (model.host_step_s + pass_s(model, one, may_capture=False)) / model.num_layers
            for one in (base, own)
        )
        loaded_s = model.host_step_s + pass_s(model, beside.plus(own))
        return cls(base_s + exposed_s, device_s, loaded_s)

    def end_s(self, begin_s: float, arrival_s: Sequence[float]) -> float:
        """When it ends at its best split. ``arrival_s``: by layer, when its matrices are there."""
        ends_s = []
        for split in range(len(arrival_s) + 1):
            now_s = begin_s + split * self.assisted_s
            for at_s in arrival_s[split:]:
                now_s = max(now_s, at_s) + self.device_s
            ends_s.append(now_s)
        return min(ends_s)


def arrivals_s(link: LinkModel, num_bytes: int, num_layers: int) -> list[float]:
    """When each layer is there, if nothing else is on the link."""
    return [
        link.latency_s + num_bytes * layer / num_layers / link.bytes_per_s
        for layer in range(1, num_layers + 1)
    ]


def measure_map() -> tuple[dict[str, Any], dict[str, bool | None]]:
    """Print all cells; their figures, and the bounds."""
    rows = {}
    print("simulated; cost over cached: waiting, layer by layer, with workers; planner; best split")
    for cell in _cells():
        rows[cell.name] = row = costs(cell)
        print(f"{cell.name:58}", *(f"{value:6.2f}" for value in row.values()), flush=True)
    regrets = [row["planner"] / min(row[one.value] for one in _FIXED) for row in rows.values()]
    over_best = [row["planner"] / row["best split"] for row in rows.values()]
    near = [row["planner"] for row in rows.values() if row["best split"] < _NEAR_CACHED]
    print(
        f"regret: at most {max(regrets):.3f}; over the best split: {min(over_best):.3f} to "
        f"{max(over_best):.3f}; over cached where the best split is near: at most {max(near):.3f}"
    )
    figures = {name: {key: round(value, 4) for key, value in row.items()} for name, row in rows.items()}
    return figures, {
        f"regret <= {MAX_REGRET}": max(regrets) <= MAX_REGRET,
        f"over the best split <= {MAX_OVER_BEST}": max(over_best) <= MAX_OVER_BEST,
        f"no less than {_LEAST_OVER_BEST} of the best split": min(over_best) >= _LEAST_OVER_BEST,
        f"<= {_MAX_NEAR_CACHED} of cached where the best is": max(near) <= _MAX_NEAR_CACHED,
    }


def _cells() -> list[SimulatedCell]:
    cells = []
    for name, rank, prompt, num_running in itertools.product(_MACHINES, _RANKS, _PROMPTS, (0, 8)):
        machine = MACHINES[name]
        for one in (machine, _with_link(machine, _SLOW_LINK_BYTES_PER_S)):
            cells.append(SimulatedCell(one, rank, prompt, num_running))
    return cells


def _with_link(machine: SimulatedMachine, bytes_per_s: float) -> SimulatedMachine:
    link = LinkModel(bytes_per_s, machine.model.link.latency_s)
    return replace(machine, model=replace(machine.model, link=link))


@dataclass(frozen=True, slots=True)
class _Times:
    """Seconds from the cold request's arrival, and the sum of the others' ends."""

    first_s: float
    second_s: float
    others_s: float


def costs(cell: SimulatedCell) -> dict[str, float]:
    """Over that of the same request with its adapter on the device."""
    cached = _run(cell, SimulationOptions(baseline="cached"))

    def over_cached(config: PlannerConfig) -> float:
        times = _run(cell, SimulationOptions(cold_starts=config))
        return (times.second_s + times.others_s - cached.others_s) / cached.second_s

    fixed = {one.value: over_cached(PlannerConfig(forced=one, priority=_AT_ONCE)) for one in _FIXED}
    best_s = _best_split_s(cell, cached.second_s)
    return fixed | {"planner": over_cached(BY_PRICE), "best split": best_s / cached.second_s}


def _first_tokens_s(cell: SimulatedCell) -> Mapping[str, float]:
    """Of a lone request, by strategy."""
    configs = {one.value: PlannerConfig(forced=one) for one in _FIXED} | {"planner": BY_PRICE}
    return {name: _run(cell, SimulationOptions(cold_starts=one)).first_s for name, one in configs.items()}


def _run(cell: SimulatedCell, options: SimulationOptions) -> _Times:
    # The first one loads the adapter of those that will run.
    first = WorkloadRequest(0.0, 0, 64, 1)
    others = [WorkloadRequest(0.5, 0, 64, _RUNNING_TOKENS)] * cell.num_running
    cold = WorkloadRequest(_ARRIVAL_S, 1, cell.prompt_tokens, 2)
    workload = Workload((first, *others, cold), (_RUNNING_RANK, cell.rank), _RUNNING_TOKENS)
    replayed = simulate(cell.machine, workload, options)
    _, *running, last = sorted(replayed.records, key=lambda one: one.request_id)
    ends_s = [one.end_s or 0.0 for one in running]
    assert last.first_token_s is not None and last.end_s is not None
    assert all(end_s > last.end_s for end_s in ends_s)
    return _Times(last.first_token_s - last.arrival_s, last.end_s - last.arrival_s, sum(ends_s))


def _best_split_s(cell: SimulatedCell, cached_s: float) -> float:
    """Least cost of both tokens, by the engine's rules.

    A step begins when the one before has ended. Rows of a loading adapter have a pass of their own,
    after that of the others. Each token begins in the step, and is split at the layer, for which
    all costs are least. ``cached_s``: contains the rest of the step that runs at the arrival.
    """
    model, num_running = cell.machine.model, cell.num_running
    num_bytes = cell.rank * cell.machine.adapter_bytes_per_rank
    running_bytes = _RUNNING_RANK * cell.machine.adapter_bytes_per_rank
    running = [[one] * num_running for one in (1, _RUNNING_KEYS, running_bytes)]
    beside = row_costs(model, *running)
    others_s = forward_s(model, *running)
    arrival_s = arrivals_s(model.link, num_bytes, model.num_layers)

    def chunk(positions: range) -> Chunk:
        ranks = [cell.rank * number for number in cell.machine.group_targets]
        products = replace(model.job, call_s=0.0)
        floors_s = [
            products.part_s(rank_sum, group.width, len(positions)) / model.num_workers
            for group, rank_sum in zip(model.groups, ranks, strict=True)
        ]
        return Chunk.of(model, num_bytes, positions, floors_s, beside)

    def steps(one: Chunk, begin_s: float) -> Iterator[tuple[float, float]]:
        """End of the chunk, and the delay of the others, for each step in which it may begin."""
        while begin_s < arrival_s[-1]:
            separate_s = pass_s(model, beside) if num_running else 0.0
            end_s = one.end_s(begin_s + separate_s, arrival_s)
            yield end_s, num_running * max(0.0, end_s - begin_s - one.loaded_s)
            begin_s = begin_s + others_s if num_running else arrival_s[-1]
        yield begin_s + one.loaded_s, 0.0

    prompt, token = chunk(range(cell.prompt_tokens)), chunk(range(cell.prompt_tokens, cell.prompt_tokens + 1))
    least_s = min(
        first_delay_s + sum(min(steps(token, first_s), key=sum))
        for first_s, first_delay_s in steps(prompt, 0.0)
    )
    return cached_s - prompt.loaded_s - token.loaded_s + least_s


def draw(path: Path) -> None:
    """Panels by prompt; in each cell the gain of the planner over layer by layer, and over waiting."""
    machine = MACHINES[_DRAWN]
    shapes = []
    for number, prompt in enumerate(_MAP_PROMPTS):
        left = _LEFT + number * (len(_MAP_LINKS_GB_PER_S) * _WIDTH + _GAP)
        shapes.append(
            _text(left + len(_MAP_LINKS_GB_PER_S) * _WIDTH / 2, _TOP - 8, f"prompt of {prompt} tokens")
        )
        for column, link in enumerate(_MAP_LINKS_GB_PER_S):
            x = left + column * _WIDTH
            for line, rank in enumerate(reversed(_MAP_RANKS)):
                y = _TOP + line * _HEIGHT
                row = _first_tokens_s(SimulatedCell(_with_link(machine, link * 1e9), rank, prompt))
                color = _COLORS[_simplest(row)]
                shapes.append(
                    f'<rect x="{x}" y="{y}" width="{_WIDTH - 1}" height="{_HEIGHT - 1}" fill="{color}"/>'
                )
                for below, fixed in ((12, LoadStrategy.PIPELINED), (24, LoadStrategy.ASYNC_LOAD)):
                    gain = _times(row[fixed.value] / row["planner"])
                    shapes.append(_text(x + _WIDTH / 2, y + below, gain))
                if not number and not column:
                    shapes.append(_text(_LEFT - 22, y + _HEIGHT / 2 + 4, f"rank {rank}"))
            shapes.append(_text(x + _WIDTH / 2, _TOP + len(_MAP_RANKS) * _HEIGHT + 13, f"{link:g}"))
        shapes.append(_text(left + 3 * _WIDTH, _TOP + len(_MAP_RANKS) * _HEIGHT + 28, "link, GB/s"))
    for number, one in enumerate(reversed(_FIXED)):
        x = _LEFT + 200 * number
        shapes.append(f'<rect x="{x}" y="8" width="14" height="14" fill="{_COLORS[one]}"/>')
        shapes.append(f'<text x="{x + 20}" y="19" text-anchor="start">best: {_NAMES[one]}</text>')
    width = _LEFT + len(_MAP_PROMPTS) * (len(_MAP_LINKS_GB_PER_S) * _WIDTH + _GAP)
    height = _TOP + len(_MAP_RANKS) * _HEIGHT + 40
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        'font-size="10" text-anchor="middle">\n<rect width="100%" height="100%" fill="white"/>\n'
    )
    path.write_text(head + "\n".join(shapes) + "\n</svg>\n", encoding="utf-8")


def _text(x: float, y: float, text: str) -> str:
    return f'<text x="{x:g}" y="{y:g}">{text}</text>'


def _simplest(row: Mapping[str, float]) -> LoadStrategy:
    """The best strategy; of equal ones the one with the fewest parts."""
    best = min(row[one.value] for one in _FIXED)
    return next(one for one in _FIXED if row[one.value] <= _SAME * best)


def _times(gain: float) -> str:
    return f"{gain:.1f}" if gain < 9.95 else f"{gain:.0f}"

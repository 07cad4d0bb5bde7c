"""For which adapters, prompts and links is co-execution? Simulated, on hand-set machines.

Bounds: on machines like A10, A100 and H100, alone and beside eight requests that decode, the
planner's choice against every fixed strategy, which starts at once at any cost; and against
the best split that bytes, arithmetic and link allow, with the work of each layer spread over all
workers. The cost of a cell is the time of the cold request's first token plus the delays of the
requests beside it. The picture: one machine, link by rank by prompt, coloured by the best strategy.
The last line is JSON.

    python bench/cold_map.py [--picture docs/co-execution.svg] [--machine a100-llama8b]
"""

import argparse
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from corun.profiles.models import LinkModel
from corun.profiles.step_time import pass_s, row_costs
from corun.runtime.coldstart.planner import BY_PRICE, PlannerConfig
from corun.runtime.coldstart.strategy import LoadStrategy
from corun.runtime.sim.engine import SimulationOptions, simulate
from corun.runtime.sim.machines import SimulatedMachine
from corun.runtime.sim.papers.machines import CORE_BYTES_PER_S, MACHINES, WIDTHS_8B
from corun.runtime.sim.workloads import Workload, WorkloadRequest
from paired import report

MAX_REGRET = 1.03  # over the best fixed strategy
MAX_OVER_BEST = 1.10  # over the best split
_MACHINES = ("a10-llama8b", "a100-llama8b", "h100-llama8b")
_FIXED = (LoadStrategy.ASYNC_LOAD, LoadStrategy.PIPELINED, LoadStrategy.ASSISTED)
_AT_ONCE = 1000.0  # a priority with which nothing waits for others
_SLOW_LINK_BYTES_PER_S = 3e9
_RANKS, _PROMPTS = (64, 256), (32, 256)
_RUNNING_RANK, _RUNNING_TOKENS, _ARRIVAL_S = 16, 400, 1.0
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
class _Cell:
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


def main() -> None:
    """Simulate, judge, draw and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--picture", type=Path, help="write this SVG, and judge nothing")
    parser.add_argument("--machine", default="a100-llama8b", help="of the picture")
    options = parser.parse_args()
    if options.picture is not None:
        _draw(MACHINES[options.machine], options.picture)
        return
    rows = {cell.name: _measure(cell) for cell in _cells()}
    print("simulated; cost over cached: waiting, layer by layer, with workers; planner; best split")
    for name, row in rows.items():
        print(f"{name:58}", *(f"{value:6.2f}" for value in row.values()), flush=True)
    regrets = {name: row["planner"] / min(row[one.value] for one in _FIXED) for name, row in rows.items()}
    over_best = {name: row["planner"] / row["best split"] for name, row in rows.items()}
    print(f"regret: at most {max(regrets.values()):.3f}; over the best split: {max(over_best.values()):.2f}")
    bounds: dict[str, bool | None] = {
        f"regret <= {MAX_REGRET}": max(regrets.values()) <= MAX_REGRET,
        f"over the best split <= {MAX_OVER_BEST}": max(over_best.values()) <= MAX_OVER_BEST,
    }
    figures = {name: {key: round(value, 4) for key, value in row.items()} for name, row in rows.items()}
    report("cold_map", {"simulated": True}, figures, bounds)


def _cells() -> list[_Cell]:
    cells = []
    for name, rank, prompt, num_running in itertools.product(_MACHINES, _RANKS, _PROMPTS, (0, 8)):
        machine = MACHINES[name]
        for one in (machine, _with_link(machine, _SLOW_LINK_BYTES_PER_S)):
            cells.append(_Cell(one, rank, prompt, num_running))
    return cells


def _with_link(machine: SimulatedMachine, bytes_per_s: float) -> SimulatedMachine:
    link = LinkModel(bytes_per_s, machine.model.link.latency_s)
    return replace(machine, model=replace(machine.model, link=link))


def _measure(cell: _Cell) -> Mapping[str, float]:
    """Costs over that of the same request with its adapter on the device."""
    cached_s, ends_s = _run(cell, SimulationOptions(baseline="cached"))

    def cost(config: PlannerConfig) -> float:
        first_s, later_s = _run(cell, SimulationOptions(cold_starts=config))
        return (first_s + later_s - ends_s) / cached_s

    fixed = {one.value: cost(PlannerConfig(forced=one, priority=_AT_ONCE)) for one in _FIXED}
    return fixed | {"planner": cost(BY_PRICE), "best split": _best_split_s(cell) / cached_s}


def _run(cell: _Cell, options: SimulationOptions) -> tuple[float, float]:
    """Seconds to the first token of the cold request, and the sum of the others' ends."""
    # The first one loads the adapter of those that will run.
    first = WorkloadRequest(0.0, 0, 64, 1)
    others = [WorkloadRequest(0.5, 0, 64, _RUNNING_TOKENS)] * cell.num_running
    cold = WorkloadRequest(_ARRIVAL_S, 1, cell.prompt_tokens, 2)
    workload = Workload((first, *others, cold), (_RUNNING_RANK, cell.rank), _RUNNING_TOKENS)
    replayed = simulate(cell.machine, workload, options)
    _, *running, last = sorted(replayed.records, key=lambda one: one.request_id)
    first_s = last.first_token_s
    assert first_s is not None and all((one.end_s or 0.0) > first_s for one in running)
    return first_s - last.arrival_s, sum(one.end_s or 0.0 for one in running)


def _best_split_s(cell: _Cell) -> float:
    """Cost of the best split, or of waiting, if each worker computes an equal part of every delta.

    A part takes as long as its bytes or its arithmetic, and hides behind the base product.
    """
    machine, model, tokens = cell.machine, cell.machine.model, cell.prompt_tokens
    num_bytes = cell.rank * machine.adapter_bytes_per_rank
    base_s = (model.host_step_s + pass_s(model, row_costs(model, [tokens], [0], [0]))) / model.num_layers
    device_s = (
        model.host_step_s + pass_s(model, row_costs(model, [tokens], [0], [num_bytes]))
    ) / model.num_layers
    assisted_s = base_s
    for group, width in zip(model.groups, WIDTHS_8B, strict=True):
        rank_sum = cell.rank * machine.group_targets[model.groups.index(group)]
        read_s = 2 * width * cell.rank / CORE_BYTES_PER_S / model.num_workers
        multiply_s = group.delta_s.at(rank_sum, 2048.0) * tokens / 2048.0 / model.num_workers
        hidden_s = group.base_s.at(tokens)
        assisted_s += model.invoke_s(tokens) + max(0.0, max(read_s, multiply_s) - hidden_s)
    link, num_running = model.link, cell.num_running
    running = row_costs(model, [1] * num_running, [100] * num_running, [0] * num_running)
    before_s = pass_s(model, running) if num_running else 0.0
    own = row_costs(model, [tokens], [0], [num_bytes])
    loaded_s = model.host_step_s + pass_s(model, running.plus(own))  # all rows in one pass
    load_s = link.latency_s + num_bytes / link.bytes_per_s
    costs_s = [max(load_s, model.host_step_s + before_s if num_running else 0.0) + loaded_s]
    for split in range(model.num_layers + 1):
        now_s = split * assisted_s
        for layer in range(split, model.num_layers):
            ready_s = link.latency_s + num_bytes * (layer + 1) / model.num_layers / link.bytes_per_s
            now_s = max(now_s, ready_s - before_s) + device_s
        end_s = before_s + now_s
        costs_s.append(end_s + num_running * max(0.0, end_s - loaded_s))
    return min(costs_s)


def _draw(machine: SimulatedMachine, path: Path) -> None:
    """Panels by prompt; in each cell the gain of the planner over layer by layer, and over waiting."""
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
                row = _measure(_Cell(_with_link(machine, link * 1e9), rank, prompt))
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


if __name__ == "__main__":
    main()

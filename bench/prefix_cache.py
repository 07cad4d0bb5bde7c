"""Does the prefix cache pay, and cost nothing without shared prefixes? On the CPU, real steps.

Engines in this process, stepped by the script, which differ in `--prefix-cache` alone, in turn
(ABBA), with the same engine measured twice as a control:

- the first token of a session's second turn, of 1,000 tokens, with the KV of the first turn;
- batches of requests that share nothing: while the cache still grows, so that new blocks touch
  unused memory, and with a full pool, so that each allocation evicts a block;
- with a KV tier on the host (`--host-bytes`, over the link): a second turn with its history only
  on the host, and the gaps of running requests while blocks move both ways.

Also measured is the memory of a process that serves sessions until it has written its budget
several times. With `--link-gib-per-s` adapters and blocks are copied. The last line is JSON.

    python bench/prefix_cache.py [--pairs 9] [--cases turn reuse host memory] [--link-gib-per-s 4]
"""

import argparse
import contextlib
import dataclasses
import logging
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from cold.cells import percentile
from cold.verdicts import at_most, is_quiet
from corun import SamplingParams
from corun.runtime.config.engine import EngineConfig
from corun.runtime.engine.assembly.build import build_engine
from corun.runtime.engine.core import EngineCore
from corun.runtime.engine.messages import AddRequest
from corun.runtime.scheduler.events import RequestUpdate
from models import VOCAB_SIZE, llama_config, make_adapters, save_model
from paired import compare, report, seconds
from resident_memory import resident_bytes

TURN_TOKENS = 1000
MAX_TURN, MAX_WITHOUT_REUSE, MAX_GAP = 0.25, 1.03, 1.10
_ANSWER_TOKENS, _NEW_TOKENS = 32, 64
_BATCH, _BATCH_PROMPT_TOKENS, _BATCH_OUTPUT_TOKENS = 8, 192, 24
_FULL_GIB, _FILLING_BATCHES = 0.03125, 4  # some 340 blocks, of which a batch takes a third
_FILLING_REQUESTS = 32  # alone they take 13 of them each
# Half the layers of the others' model, and as wide: beside its arithmetic a block's memory, which
# costs something when it is touched for the first time, weighs the more the narrower a model is.
_MODEL = {"num_hidden_layers": 6}
_NUM_RUNNING, _NUM_RETURNS = 4, 8
_BUDGET_GIB, _BUDGET_TIMES = 0.0625, 3
_HOST_OPTION = "host_bytes"
_CASES = ("turn", "reuse", "host", "memory")
_TIMEOUT_S = 120.0


class Served:
    """An engine, and its answers to random prompts."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self._rng = random.Random(0)
        self._num_requests = 0

    def prompt(self, num_tokens: int) -> tuple[int, ...]:
        """A random prompt that was never used before."""
        return tuple(self._rng.randrange(3, VOCAB_SIZE) for _ in range(num_tokens))

    def add(self, prompt: Sequence[int], max_tokens: int, adapter: str | None = None) -> int:
        self._num_requests += 1
        sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, seed=0)
        self.core.add_request(AddRequest(self._num_requests, tuple(prompt), sampling, adapter))
        return self._num_requests

    def updates(self) -> Iterator[RequestUpdate]:
        """Of steps, until nothing is left to do."""
        deadline_s = time.monotonic() + _TIMEOUT_S
        while self.core.has_work:
            for update in self.core.step(1.0):
                if update.error is not None:
                    raise RuntimeError(update.error)
                yield update
            if time.monotonic() > deadline_s:
                raise TimeoutError("the requests are not served")

    def answer(self, prompt: Sequence[int], max_tokens: int, adapter: str | None = None) -> tuple[int, ...]:
        self.add(prompt, max_tokens, adapter)
        return tuple(token for update in self.updates() for token in update.token_ids)

    def next_turn(self) -> tuple[int, ...]:
        """The second turn of a session, after the answer to the first."""
        first = self.prompt(TURN_TOKENS - _ANSWER_TOKENS - _NEW_TOKENS)
        return (*first, *self.answer(first, _ANSWER_TOKENS), *self.prompt(_NEW_TOKENS))

    def first_token_s(self, prompt: Sequence[int], *, is_known: bool) -> float:
        """Seconds to the only token of a request with a mostly cached, or an unknown, prompt."""
        self.add(prompt, 1)
        start_s = time.perf_counter()
        (update,) = self.updates()
        taken_s = time.perf_counter() - start_s
        assert (update.num_cached_tokens > len(prompt) // 2) == is_known, update
        return taken_s

    def second_turn_s(self, *, is_known: bool) -> float:
        return self.first_token_s(self.next_turn(), is_known=is_known)

    def batch_s(self) -> float:
        """Seconds of requests that begin together and share nothing."""
        for _ in range(_BATCH):
            self.add(self.prompt(_BATCH_PROMPT_TOKENS), _BATCH_OUTPUT_TOKENS)
        return seconds(lambda: list(self.updates()))

    def far_turn(self) -> tuple[int, ...]:
        """A second turn; what the first has left has made room for others."""
        turn = self.next_turn()
        for _ in range(_FILLING_REQUESTS):  # one by one: blocks are copied before they must go
            self.answer(self.prompt(_BATCH_PROMPT_TOKENS), 2)
        return turn

    def gap_s(self, turns: Sequence[Sequence[int]]) -> float:
        """p95 of running requests' gaps between tokens while sessions come back one by one."""
        left = list(turns)
        num_tokens = 12 * (len(left) + 2)
        running = {self.add(self.prompt(16), num_tokens): 0.0 for _ in range(_NUM_RUNNING)}
        gaps: list[float] = []
        num_seen = 0
        for update in self.updates():
            if update.request_id not in running:
                continue
            now_s, last_s = time.perf_counter(), running[update.request_id]
            if last_s and len(left) < len(turns):
                gaps.append(now_s - last_s)
            running[update.request_id] = now_s
            num_seen += 1
            if left and num_seen % (12 * _NUM_RUNNING) == 0:
                self.add(left.pop(), 1)
        assert not left, "requests ended before all sessions had come back"
        return percentile(gaps, 0.95)


@dataclasses.dataclass(frozen=True, slots=True)
class Bench:
    """What all cases have in common."""

    directory: Path
    num_pairs: int
    link_gib_per_s: float | None

    @contextlib.contextmanager
    def engine(self, *, is_on: bool = True, **options: Any) -> Iterator[Served]:
        """An engine of the benchmark's model, with these options."""
        config = EngineConfig(
            model=str(self.directory / "model"),
            device="cpu",
            dtype="bfloat16",
            prefix_cache="on" if is_on else "off",
            # Else each engine chooses these two by a measurement at its start.
            cpu_threads=os.cpu_count(),
            linear_backend="numba",
            link_gib_per_s=self.link_gib_per_s,
            **options,
        )
        assembly = build_engine(config, on_progress=lambda _: None, own_process=True)
        try:
            yield Served(assembly.core)
        finally:
            assembly.close()

    def compare(
        self,
        name: str,
        bound: float,
        a: Callable[[], float],
        b: Callable[[], float],
        control: Callable[[], float] | None = None,
    ) -> tuple[dict[str, Any], dict[str, bool | None]]:
        """A over B beside ``control`` over itself (None = B); figures and the bound."""
        same = control or b
        a(), b(), same()
        ratio, a_s, b_s = compare(a, b, self.num_pairs, progress=name)
        again, _, _ = compare(same, same, self.num_pairs, progress=f"{name}, control")
        figures = {
            "ratio": ratio.to_json(),
            "ms": [round(1e3 * statistics.median(values), 2) for values in (a_s, b_s)],
            "control": again.to_json(),
        }
        print(f"{name}: {figures}", flush=True)
        held = at_most(ratio, bound, quiet=is_quiet(again))
        return {name: figures}, {f"{name} <= {bound:g}": held}

    def turn(self) -> Iterator[tuple[dict[str, Any], dict[str, bool | None]]]:
        """The second turn with and without the cache."""
        with self.engine() as on, self.engine(is_on=False) as off:
            yield self.compare(
                "second turn",
                MAX_TURN,
                lambda: on.second_turn_s(is_known=True),
                lambda: off.second_turn_s(is_known=False),
            )

    def reuse(self) -> Iterator[tuple[dict[str, Any], dict[str, bool | None]]]:
        """Requests that share nothing."""
        for name, memory_gib in (("history grows", None), ("pool full", _FULL_GIB)):
            options: dict[str, Any] = {"memory_gib": memory_gib, "max_model_len": TURN_TOKENS}
            with self.engine(**options) as on, self.engine(is_on=False, **options) as off:
                for _ in range(0 if memory_gib is None else _FILLING_BATCHES):
                    on.batch_s()
                yield self.compare(f"no reuse, {name}", MAX_WITHOUT_REUSE, on.batch_s, off.batch_s)

    def host(self) -> Iterator[tuple[dict[str, Any], dict[str, bool | None]]]:
        """History that is only on the host."""
        options: dict[str, Any] = {"memory_gib": _FULL_GIB, "max_model_len": TURN_TOKENS + 1}
        on_host = options | {_HOST_OPTION: str(2**30)}
        with self.engine(**on_host) as host, self.engine(is_on=False, **options) as off:
            yield self.compare(
                "second turn, from the host",
                MAX_TURN,
                lambda: host.first_token_s(host.far_turn(), is_known=True),
                lambda: off.second_turn_s(is_known=False),
            )
            with self.engine(max_model_len=TURN_TOKENS + 1) as still:

                def gap_s(served: Served) -> float:
                    turns = [served.next_turn() for _ in range(_NUM_RETURNS)]
                    return served.gap_s(turns)

                yield self.compare(
                    "p95 gap while blocks move", MAX_GAP, lambda: gap_s(host), lambda: gap_s(still)
                )

    def memory(self) -> Iterator[tuple[dict[str, Any], dict[str, bool | None]]]:
        """In a process of its own."""
        command = [sys.executable, __file__, "--serve", str(self.directory)]
        if self.link_gib_per_s is not None:
            command += ["--link-gib-per-s", str(self.link_gib_per_s)]
        output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        grown, budget, written = map(int, output.split()[-3:])
        figures = {"grown_mib": grown >> 20, "budget_mib": budget >> 20, "kv_mib": written >> 20}
        print(f"memory: {figures}", flush=True)
        assert written >= _BUDGET_TIMES * budget, "too little was written to show anything"
        yield {"memory": figures}, {"memory within the budget": grown <= budget}

    def serve_and_print(self) -> None:
        """Serve sessions, and print what the process has grown by, its budget, and all KV."""
        options: dict[str, Any] = {
            "memory_gib": _BUDGET_GIB,
            "max_model_len": 2 * TURN_TOKENS,
            "preload": ("all",),
        }
        with self.engine(lora_dir=str(self.directory / "adapters"), **options) as served:
            names = [None, *sorted(path.name for path in (self.directory / "adapters").iterdir())]
            served.answer(served.prompt(TURN_TOKENS), 2)  # what computes is there from now on
            stats, budget_bytes = served.core.stats(), int(_BUDGET_GIB * 2**30)
            block_bytes = budget_bytes // stats.kv_blocks_total
            begin_bytes, most_bytes, written_bytes, turn = resident_bytes(), 0, 0, 0
            while written_bytes < _BUDGET_TIMES * budget_bytes:
                first = served.prompt(TURN_TOKENS)
                name = names[turn % len(names)]
                answer = served.answer(first, 8, name)
                served.answer((*first, *answer, *served.prompt(8)), 2, name)
                num_tokens = served.core.stats().prompt_tokens_computed
                written_bytes = num_tokens // 16 * block_bytes  # tokens of a block
                most_bytes = max(most_bytes, resident_bytes())
                turn += 1
        print(most_bytes - begin_bytes, budget_bytes, written_bytes)


def main() -> None:
    """Measure and print."""
    has_host = any(field.name == _HOST_OPTION for field in dataclasses.fields(EngineConfig))
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--cases", nargs="+", choices=_CASES, default=list(_CASES))
    parser.add_argument("--link-gib-per-s", type=float)
    parser.add_argument("--directory", help="directory to store or reuse model and adapters")
    parser.add_argument("--serve", type=Path, metavar="DIRECTORY", help=argparse.SUPPRESS)
    options = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    if options.serve is not None:
        Bench(options.serve, options.pairs, options.link_gib_per_s).serve_and_print()
        return
    figures: dict[str, Any] = {}
    bounds: dict[str, bool | None] = {}
    with tempfile.TemporaryDirectory() as temporary:
        bench = Bench(Path(options.directory or temporary), options.pairs, options.link_gib_per_s)
        if not (bench.directory / "model").exists():
            save_model(llama_config(**_MODEL), bench.directory / "model")
            make_adapters(bench.directory / "model", bench.directory / "adapters")
        for case in options.cases:
            if case == "host" and (options.link_gib_per_s is None or not has_host):
                continue  # there is no tier
            for found, judged in getattr(bench, case)():
                figures |= found
                bounds |= judged
    workload = {name: getattr(options, name) for name in ("pairs", "cases", "link_gib_per_s")}
    report("prefix_cache", workload | {"model": "llama-80m bf16"}, figures, bounds)


if __name__ == "__main__":
    main()

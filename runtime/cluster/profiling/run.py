"""Measures a server part by part; each finished part is saved and not measured again.

Adapters are written for the measurement: the server must see their directory under the same path.
"""

import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from .... import __version__
from ....profiles.meter import Meter, OnReport
from ....profiles.profile import Profile, ProfileError, check_fits
from ....profiles.server import BaseModel, MeasuredServer, SeenServer
from ...server.errors import HttpError
from ...whole_file import write_whole
from ..engine_types.vllm import inspect_server, metrics_of
from ..engine_types.vllm_api import VllmApi
from ..http.calls import make_session
from .adapters import write_adapter
from .bench import STEPS, ServerBench
from .compose import Notes, Repeated, ServerTimes, Sizes, compose_server

_SHORT_TOKENS = 32
_MAX_LONG_TOKENS = 1024
_NAME = "corun-profile"
_MIN_RANKS = 2  # to fit a line through loads

Case = Callable[[], Awaitable[float]]
OnProgress = Callable[[int, int], None]  # measurements done, and their total


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerEffort:
    """The sizes to measure, ascending; they are cut to the server's limits."""

    name: str
    num_rounds: int  # after a warm-up round
    prefill_tokens: tuple[int, ...]
    decode_rows: tuple[int, ...]
    ranks: tuple[int, ...]


SERVER_EFFORTS: Mapping[str, ServerEffort] = {
    "quick": ServerEffort(
        name="quick", num_rounds=3, prefill_tokens=(16, 64, 256, 1024, 2048),
        decode_rows=(1, 4, 8, 16), ranks=(8, 16, 32, 64),
    ),
    "thorough": ServerEffort(
        name="thorough", num_rounds=7,
        prefill_tokens=(16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192),
        decode_rows=(1, 2, 4, 8, 16, 32, 64), ranks=(8, 16, 32, 64, 128),
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerTask:
    """One measurement of a server."""

    url: str
    key: str  # of the server
    base: BaseModel
    base_name: str
    adapters_dir: Path  # visible to the server under this path
    kept_path: Path  # of finished parts, until all are done
    effort: ServerEffort
    max_num_batched_tokens: int
    max_num_seqs: int


class _Kept(msgspec.Struct, frozen=True):
    """The file of an unfinished task: the server, and the parts measured so far."""

    server: MeasuredServer
    effort: str
    times: ServerTimes


async def profile_server(
    task: ServerTask, say: Callable[[str], None], on_report: OnReport
) -> Profile:
    """Measure a server, or the parts that an earlier run has left.

    Raises ``HttpError`` for a server that cannot be an engine, ``ProfileError`` if it cannot be
    measured or no model fits its times, and ``OSError`` if the adapters cannot be written.
    """
    async with make_session(task.key) as session:
        name, seen = await inspect_server(session, task.url)

        async def num_others() -> int:
            metrics = await metrics_of(session, task.url)
            return metrics.num_running + metrics.num_waiting

        bench = ServerBench(session, task.url, task.base.vocab_size, seed=time.time_ns())
        api = VllmApi(session, task.url)
        return await _Run(task, seen, name, bench, api).run(say, on_report, num_others)


class _Run:
    def __init__(
        self, task: ServerTask, seen: SeenServer, model: str, bench: ServerBench, api: VllmApi
    ) -> None:
        """``model``: the server's name of its base model."""
        self._task = task
        self._seen = seen
        self._base = model
        self._bench = bench
        self._api = api
        self._server = MeasuredServer(
            "vllm", seen, task.base.fingerprint, task.max_num_batched_tokens, task.max_num_seqs
        )
        effort = task.effort
        self._rows = _cut(effort.decode_rows, task.max_num_seqs)
        limit = min(task.max_num_batched_tokens, seen.max_model_len - 1)
        self._tokens = _cut(effort.prefill_tokens, limit)
        longest = seen.max_model_len - STEPS - 2 * self._rows[-1] - 1
        self._sizes = Sizes(short_tokens=_SHORT_TOKENS, long_tokens=min(_MAX_LONG_TOKENS, longest))
        if longest < 2 * _SHORT_TOKENS or len(self._tokens) < 2:
            raise ProfileError(
                f"{task.url} takes {seen.max_model_len} tokens of prompt and output, which are too "
                "few to measure it (--max-model-len)"
            )
        self._models: dict[int, str] = {}  # by rank: the name at the server
        self._times = ServerTimes()
        self._busy: list[str] = []

    async def run(
        self, say: Callable[[str], None], on_report: OnReport,
        num_others: Callable[[], Awaitable[int]],
    ) -> Profile:  # fmt: skip
        started_s = time.monotonic()
        self._times = self._resumed(say)
        async with self._adapters():
            await self._bench.begin()
            parts = self._parts()
            expected_s = await self._expected_s(parts)
            say(f"measuring takes about {sum(expected_s.values()):.0f} s")
            meter = Meter(expected_s, on_report, time.monotonic)
            for name, cases in parts.items():
                if await num_others():
                    self._busy.append("the server had requests of others")
                await self._part(name, cases, meter.begin(name, _WHAT[name]))
        notes = Notes(
            corun_version=__version__,
            created_at=datetime.now(UTC).isoformat(timespec="seconds"),
            measured_s=round(time.monotonic() - started_s, 1),
            is_thorough=self._task.effort.name == "thorough",
            busy_reasons=tuple(dict.fromkeys(self._busy)),
        )
        profile = compose_server(self._times, self._sizes, self._task.base, self._server, notes)
        self._task.kept_path.unlink(missing_ok=True)
        check_fits(profile)
        return profile

    # Parts.

    def _parts(self) -> dict[str, dict[tuple[int, ...], Case]]:
        """Return the cases of each missing part, by rank (if any) and size."""
        bench, base = self._bench, self._base

        def first_token(model: str, tokens: int) -> Case:
            return lambda: bench.first_token_s(model, tokens)

        def step(model: str, rows: int, context: int) -> Case:
            return lambda: bench.step_s(model, rows, context)

        short, long = self._sizes.short_tokens, self._sizes.long_tokens
        models = self._models.items()
        parts: dict[str, dict[tuple[int, ...], Case]] = {
            "prefill": {(n,): first_token(base, n) for n in self._tokens},
            "decode": {(n,): step(base, n, short) for n in self._rows},
            "long_decode": {(n,): step(base, n, long) for n in self._rows},
            "lora_prefill": {
                (rank, n): first_token(model, n) for rank, model in models for n in self._tokens
            },
            "lora_decode": {
                (rank, n): step(model, n, short) for rank, model in models for n in self._rows
            },
            "load": {(rank,): self._load(rank) for rank in self._models},
        }
        return {name: cases for name, cases in parts.items() if not getattr(self._times, name)}

    async def _part(
        self, name: str, cases: Mapping[tuple[int, ...], Case], on_progress: OnProgress
    ) -> None:
        """Measure all cases in rounds, in alternating order; the first round warms up."""
        num_rounds = self._task.effort.num_rounds
        found: dict[tuple[int, ...], list[float]] = {key: [] for key in cases}
        num_done, num_total = 0, len(cases) * (num_rounds + 1)
        for number in range(num_rounds + 1):
            for key in cases if number % 2 else reversed(list(cases)):
                seconds = await cases[key]()
                if number:
                    found[key].append(seconds)
                num_done += 1
                on_progress(num_done, num_total)
        part: dict[str, Any] = {name: _nested(found)}
        self._times = replace(self._times, **part)
        kept = _Kept(self._server, self._task.effort.name, self._times)
        write_whole(self._task.kept_path, msgspec.json.encode(kept))

    def _load(self, rank: int) -> Case:
        """Load under a new name each time: the server reads a known name only once."""

        async def measure() -> float:
            model = f"{_NAME}-{rank}-{time.time_ns()}"
            started_s = time.perf_counter()
            await self._api.put(model, str(self._directory(rank)))
            seconds = time.perf_counter() - started_s
            await self._api.drop(model)
            return max(seconds, 1e-6)

        return measure

    async def _expected_s(
        self, parts: Mapping[str, Mapping[tuple[int, ...], Case]]
    ) -> dict[str, float]:
        """Estimate the time of each part from the largest cases with the largest adapter."""
        rounds, model = self._task.effort.num_rounds + 1, self._models[max(self._models)]
        prompt_s = await self._bench.first_token_s(model, self._tokens[-1])
        step_s = await self._bench.step_s(model, self._rows[-1], self._sizes.short_tokens)
        decode_s = step_s * (STEPS + self._rows[-1])  # an upper bound for smaller batches
        each_s = {"prefill": prompt_s / 2, "lora_prefill": prompt_s / 2, "load": 0.1}
        return {
            name: rounds * len(cases) * each_s.get(name, decode_s) for name, cases in parts.items()
        }

    def _resumed(self, say: Callable[[str], None]) -> ServerTimes:
        """Return the parts of an earlier run, if server and effort are the same."""
        try:
            kept = msgspec.json.decode(self._task.kept_path.read_bytes(), type=_Kept)
        except (OSError, msgspec.DecodeError):
            return ServerTimes()
        unlike = kept.server.seen.unlike(self._seen)
        is_same = replace(kept.server, seen=self._seen) == self._server and not unlike
        if not is_same or kept.effort != self._task.effort.name:
            return ServerTimes()
        names = [what for name, what in _WHAT.items() if getattr(kept.times, name)]
        say(f"using parts of an earlier run: {', '.join(names)}")
        return kept.times

    # Adapters.

    def _directory(self, rank: int) -> Path:
        return self._task.adapters_dir / f"{_NAME}-{rank}"

    @contextlib.asynccontextmanager
    async def _adapters(self) -> AsyncIterator[None]:
        """Load an adapter of each supported rank; remove adapters and files after the block."""
        try:
            for rank in self._task.effort.ranks:
                if not await self._add(rank):
                    break
            yield
        finally:
            for rank in self._task.effort.ranks:
                with contextlib.suppress(HttpError):
                    await self._api.drop(f"{_NAME}-{rank}")
                directory = self._directory(rank)
                for file in list(directory.glob("adapter_*")):
                    file.unlink()
                if directory.is_dir():
                    directory.rmdir()

    async def _add(self, rank: int) -> bool:
        """Load an adapter; return False if the server refuses it.

        Raises ``ProfileError`` if the server takes too few ranks, or does not see the directory.
        """
        directory, name = self._directory(rank), f"{_NAME}-{rank}"
        write_adapter(directory, self._task.base, rank, self._task.base_name)
        await self._api.drop(name)
        try:
            await self._api.put(name, str(directory))
        except HttpError as error:
            if error.status == 404:
                raise ProfileError(
                    f"{self._task.url} does not see {directory}; give --adapters-dir, a directory "
                    f"that it sees under the same path ({error})"
                ) from error
            if len(self._models) < _MIN_RANKS:
                raise ProfileError(
                    f"{self._task.url} does not take an adapter of rank {rank}, and "
                    f"{_MIN_RANKS} are needed (--max-lora-rank): {error}"
                ) from error
            return False
        self._models[rank] = name
        return True


_WHAT: Mapping[str, str] = {
    "prefill": "base model, prefill",
    "decode": "base model, decode",
    "long_decode": "base model, decode behind long prompts",
    "lora_prefill": "adapters, prefill",
    "lora_decode": "adapters, decode",
    "load": "loads of adapters",
}


def _nested(found: Mapping[tuple[int, ...], list[float]]) -> Repeated | dict[int, Repeated]:
    if all(len(key) == 1 for key in found):
        return {key[0]: values for key, values in found.items()}
    nested: dict[int, Repeated] = {}
    for (rank, size), values in found.items():
        nested.setdefault(rank, {})[size] = values
    return nested


def _cut(sizes: Sequence[int], limit: int) -> tuple[int, ...]:
    """Return sizes up to the limit, and the limit itself if some were beyond."""
    fitting = [size for size in sizes if size <= limit]
    if len(fitting) < len(sizes) and limit > 0 and limit not in fitting:
        fitting.append(limit)
    return tuple(fitting)

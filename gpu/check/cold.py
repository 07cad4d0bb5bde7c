"""How does a cold request start best on this machine, and what does a load cost running requests?

A whole engine with CPU workers serves a model with the layers of an 8B model, but fewer of them:
the link's time and that of the layers shrink alike. The engine measures its profile at its start,
as always; the report keeps it, so that this machine can be simulated.
"""

import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import save_file

from ...profiles.models import MachineModel
from ...runtime.coldstart.cold_start import PlannedColdStarts
from ...runtime.coldstart.planner import Planner, PlannerConfig
from ...runtime.coldstart.strategy import LoadStrategy
from ...runtime.config.engine import EngineConfig
from ...runtime.engine.assembly.build import EngineAssembly, build_engine
from ...runtime.engine.messages import AddRequest
from ...runtime.sampling import SamplingParams
from .questions import Findings, rounded
from .steps import llama_8b

_STEP_S = 1.0
_REQUEST_S = 60.0
_CACHED = "on the device"
_STRATEGIES = (LoadStrategy.ASYNC_LOAD, LoadStrategy.PIPELINED, LoadStrategy.ASSISTED)
_NUM_ROUNDS = 3
_WORD = "t2"  # the end of texts


@dataclass(frozen=True, slots=True)
class ColdSizes:
    """How much is done: on a GPU, or to run the control flow."""

    config: dict[str, Any]
    ranks: tuple[int, ...]
    prompts: tuple[int, ...]
    running_tokens: int  # of the request beside which an adapter is loaded
    options: dict[str, Any]  # of the engine


FULL = ColdSizes(llama_8b(8), (16, 256), (128, 2048), 200, {"device": "cuda", "memory_gib": 3.0})
TINY = ColdSizes(
    {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "vocab_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    (4,),
    (8,),
    12,
    {"device": "cpu", "memory_gib": 0.05, "link_gib_per_s": 0.5},
)


def answer(_name: str, kind: str, limit_s: float, figures: Findings) -> None:
    """First tokens of cold requests by strategy, and the gaps of a running request."""
    until_s = time.monotonic() + limit_s
    size = FULL if kind == "cuda" else TINY
    with tempfile.TemporaryDirectory(prefix="corun-gpu-check-") as folder:
        os.environ["XDG_STATE_HOME"] = folder  # this model's profile is of no use to later starts
        save_random(size.config, size.ranks, Path(folder), kind)
        torch.cuda.empty_cache()  # the engine counts what is free
        config = EngineConfig(
            model=f"{folder}/model",
            lora_dir=f"{folder}/adapters",
            dtype="bfloat16",
            preload=("all",),
            max_lora_rank=max(size.ranks),
            **size.options,
        )
        start_s = time.monotonic()
        assembly = build_engine(config, on_progress=lambda _: None, own_process=True)
        try:
            figures.put("start_s", rounded(time.monotonic() - start_s))
            figures.put("summary", list(assembly.info.summary))
            measure(assembly, size, figures, until_s)
        finally:
            assembly.close()


def measure(assembly: EngineAssembly, size: ColdSizes, figures: Findings, until_s: float) -> None:
    """Measure an engine that has the adapters, one of each rank, on the host."""
    coexecution = assembly.parts.coexecution
    if coexecution is None or coexecution.pool is None:
        figures.put("refused", "co-execution is off on this machine; the summary says why")
        return
    figures.put("profile", msgspec.to_builtins(coexecution.profile))
    driver = _Driver(assembly, coexecution.cold_starts, coexecution.profile.model)
    for rank in size.ranks:
        for prompt in size.prompts:
            if time.monotonic() > until_s:
                raise TimeoutError(f"no time was left for rank {rank}, {prompt} tokens and what follows")
            found = {
                name: rounded(statistics.median(driver.first_s(f"rank-{rank}", prompt, name)) * 1e3)
                for name in (_CACHED, *(strategy.value for strategy in _STRATEGIES))
            }
            figures.put(f"first token, rank {rank}, prompt of {prompt}, ms", found)
    for strategy in _STRATEGIES:
        gaps = driver.gaps_ms(f"rank-{size.ranks[-1]}", size, strategy)
        figures.put(f"gaps beside a load, {strategy.value}, ms", gaps)


class _Driver:
    """Runs requests in the engine's thread, which is the calling one."""

    def __init__(self, assembly: EngineAssembly, starts: PlannedColdStarts, model: MachineModel) -> None:
        self._core = assembly.core
        self._adapters = assembly.adapters
        self._starts = starts
        self._model = model
        self._vocab_size = int(assembly.parts.loaded.config.vocab_size)
        self._rng = random.Random(0)  # noqa: S311 - prompts
        self._next_id = 0

    def first_s(self, adapter: str, prompt: int, strategy: str) -> list[float]:
        """Seconds to the first token, without the first round: it warms up what a start does not."""
        times = []
        for _ in range(_NUM_ROUNDS + 1):
            self._prepare(adapter, strategy)
            request_id, start_s = self._add(adapter, prompt, 1), time.perf_counter()
            times.append(self._token_times({request_id: 1})[request_id][0] - start_s)
        return times[1:]

    def gaps_ms(self, adapter: str, size: ColdSizes, strategy: LoadStrategy) -> dict[str, float]:
        """Between tokens of a running request: as usual, and at most beside a load."""
        self._prepare(adapter, strategy.value)
        running = self._add(None, size.prompts[0], size.running_tokens)
        before = self._token_times({running: size.running_tokens // 2})[running]
        cold = self._add(adapter, size.prompts[0], 1)
        wanted = {running: size.running_tokens - len(before), cold: 1}
        times = [*before, *self._token_times(wanted)[running]]
        gaps = [(late - early) * 1e3 for early, late in pairwise(times)]
        return {"median": rounded(statistics.median(gaps)), "max": rounded(max(gaps[len(before) - 1 :]))}

    def _prepare(self, adapter: str, strategy: str) -> None:
        """Bring the adapter onto the device or off it, and let cold requests start by ``strategy``."""
        self._finish()
        forced = None if strategy == _CACHED else LoadStrategy(strategy)
        self._starts.set_planner(Planner(self._model, PlannerConfig(forced=forced)))
        version = self._adapters.resolve(adapter)
        is_there = self._core.residency(version).level == "device"
        if strategy == _CACHED and not is_there:
            self._token_times({self._add(adapter, 1, 1): 1})
        elif strategy != _CACHED and is_there and not self._core.evict_adapter(adapter):
            raise RuntimeError(f"{adapter} cannot be evicted, so its next request is not cold")
        self._finish()

    def _add(self, adapter: str | None, prompt: int, num_tokens: int) -> int:
        self._next_id += 1
        sampling = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, seed=0)
        tokens = tuple(self._rng.randrange(3, self._vocab_size) for _ in range(prompt))
        self._core.add_request(AddRequest(self._next_id, tokens, sampling, adapter))
        return self._next_id

    def _token_times(self, wanted: dict[int, int]) -> dict[int, list[float]]:
        """Step until each request has so many more tokens; when they came, by the clock."""
        times: dict[int, list[float]] = {request_id: [] for request_id in wanted}
        deadline_s = time.perf_counter() + _REQUEST_S
        while any(len(times[request_id]) < number for request_id, number in wanted.items()):
            updates = self._core.step(_STEP_S)
            now_s = time.perf_counter()
            for update in updates:
                if update.error is not None:
                    raise RuntimeError(f"a request failed: {update.error}")
                times[update.request_id] += [now_s] * len(update.token_ids)
            if now_s > deadline_s:
                raise TimeoutError(f"requests have too few tokens after {_REQUEST_S:.0f} s: {wanted}")
        return times

    def _finish(self) -> None:
        """Step until nothing is under way."""
        deadline_s = time.perf_counter() + _REQUEST_S
        while self._core.has_work:
            self._core.step(_STEP_S)
            if time.perf_counter() > deadline_s:
                raise TimeoutError("the engine does not become idle")


def save_random(values: dict[str, Any], ranks: Sequence[int], folder: Path, device: str) -> None:
    """Save a Llama of random weights, and for each rank an adapter for all its linears.

    Every token has text, so that each is an event of a stream.
    """
    from tokenizers import Tokenizer, models
    from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(LlamaConfig(**values), dtype=torch.bfloat16)
    model.save_pretrained(folder / "model")
    vocabulary = {f"t{number}": number for number in range(model.config.vocab_size)}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token=_WORD))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token=_WORD).save_pretrained(folder / "model")
    linears = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and name.startswith("model.layers.")
    ]
    names = sorted({name.rpartition(".")[2] for name, _ in linears})
    for rank in ranks:
        path = folder / "adapters" / f"rank-{rank}"
        path.mkdir(parents=True)
        tensors = {}
        for name, module in linears:
            prefix = f"base_model.model.{name}"
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(rank, module.in_features) * 0.02
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(module.out_features, rank) * 0.02
        save_file({n: t.to(torch.bfloat16) for n, t in tensors.items()}, path / "adapter_model.safetensors")
        settings = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": rank}
        (path / "adapter_config.json").write_text(json.dumps({**settings, "target_modules": names}))

"""How many times transformers + PEFT's mixed-adapter batch does the engine compute?

Both get the same batch of prompts, each with an adapter of its own (ranks 8 to 128), and produce
the same number of tokens greedily, in turn (ABBA), on the same cores with the same instructions, or
on the same GPU. The bounds are of CPUs: with a GPU nothing is judged.
PEFT has a process of its own, as otherwise its threads would count among those of the engine's
process (see ``models.one_torch_thread``).

    python bench/against_peft.py [--pairs 7] [--device cpu]
"""

import argparse
import contextlib
import multiprocessing
import random
import tempfile
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import peft
import torch
from corun import Engine, SamplingParams
from corun.cpu_workers.kernels.simd.isa import process_isa
from models import RANKS, VOCAB_SIZE, make_adapters, make_model
from paired import MAX_CONTROL_SPREAD, compare, report, seconds
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

# Pairs of engine runs per pair with PEFT: they take a quarter of the time and resolve smaller
# differences.
OWN_PAIRS = 3
REQUIRED_OVER_BASE_ONLY = 0.85
_PEFT_TIMEOUT_S = 300.0  # one batch takes seconds, the first one also loads the model


@dataclass(frozen=True, slots=True)
class Batch:
    """One cell: requests that start together."""

    num_requests: int
    prompt_tokens: int
    output_tokens: int
    required_ratio: float  # with AVX512_BF16, which PEFT's products use as well


BATCHES = (Batch(8, 128, 32, required_ratio=2.6), Batch(16, 64, 64, required_ratio=3.4))
# Without, torch converts weights at each product.
_REQUIRED_WITHOUT_PAIRS = 4.0


class PeftModel:
    """transformers + PEFT, as its documentation says to run mixed batches."""

    def __init__(self, model: Path, adapters: dict[str, Path], device: str) -> None:
        base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).to(device)
        names = list(adapters)
        self._model = peft.PeftModel.from_pretrained(base, adapters[names[0]], names[0])
        for name in names[1:]:
            self._model.load_adapter(adapters[name], name)
        self._model.eval()

    def run(self, prompts: list[list[int]], names: list[str], batch: Batch) -> None:
        """Generate for one batch."""
        inputs = torch.tensor(prompts, device=self._model.device)
        with torch.inference_mode():
            self._model.generate(
                input_ids=inputs,
                attention_mask=torch.ones_like(inputs),
                adapter_names=names,
                max_new_tokens=batch.output_tokens,
                min_new_tokens=batch.output_tokens,
                do_sample=False,
                pad_token_id=0,
            )


def _serve_peft(pipe: Connection, model: Path, adapters: dict[str, Path], device: str) -> None:
    """Run what comes through the pipe, and answer that it is done."""
    transformers_logging.disable_progress_bar()
    theirs = PeftModel(model, adapters, device)
    with contextlib.suppress(EOFError):
        while True:
            theirs.run(*pipe.recv())
            pipe.send(None)


class PeftRunner:
    """A ``PeftModel`` in a process of its own."""

    def __init__(self, model: Path, adapters: dict[str, Path], device: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        arguments = (theirs, model, adapters, device)
        self._process = context.Process(target=_serve_peft, args=arguments, daemon=True)
        self._process.start()
        theirs.close()

    def run(self, prompts: list[list[int]], names: list[str], batch: Batch) -> None:
        """Generate for one batch. Raises EOFError if the process has ended, TimeoutError."""
        self._pipe.send((prompts, names, batch))
        if not self._pipe.poll(_PEFT_TIMEOUT_S):
            raise TimeoutError(f"PEFT took more than {_PEFT_TIMEOUT_S:.0f} s for a batch")
        self._pipe.recv()


class CorunRunner:
    """The engine, with adapters that stay on the device."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def run(self, prompts: list[list[int]], names: list[str | None], batch: Batch) -> None:
        """Generate for one batch."""
        params = SamplingParams(temperature=0, max_tokens=batch.output_tokens, ignore_eos=True)
        outputs = self._engine.generate(prompts, params, names)
        assert all(len(o.outputs[0].token_ids) == batch.output_tokens for o in outputs)


def measure(batch: Batch, ours: CorunRunner, theirs: PeftRunner, num_pairs: int) -> dict[str, Any]:
    """Measure one cell with its A/A control."""
    rng = random.Random(batch.num_requests)
    prompts = [
        [rng.randrange(3, VOCAB_SIZE) for _ in range(batch.prompt_tokens)] for _ in range(batch.num_requests)
    ]
    names = [f"adapter-{i % len(RANKS)}-r{RANKS[i % len(RANKS)]}" for i in range(len(prompts))]
    num_tokens = batch.num_requests * batch.output_tokens

    def corun_rate() -> float:
        return num_tokens / seconds(lambda: ours.run(prompts, list(names), batch))

    def base_rate() -> float:
        return num_tokens / seconds(lambda: ours.run(prompts, [None] * len(names), batch))

    def peft_rate() -> float:
        return num_tokens / seconds(lambda: theirs.run(prompts, names, batch))

    corun_rate(), base_rate(), peft_rate()
    label = f"{batch.num_requests} requests"
    num_own_pairs = OWN_PAIRS * num_pairs
    control, _, _ = compare(corun_rate, corun_rate, num_own_pairs, progress=f"{label}, control")
    ratio, ours_rates, peft_rates = compare(
        corun_rate, peft_rate, num_pairs, progress=f"{label}, corun / PEFT"
    )
    lora_cost, _, _ = compare(
        corun_rate, base_rate, num_own_pairs, progress=f"{label}, ten adapters / base only"
    )
    return {
        "batch": asdict(batch),
        "corun_tokens_per_s": round(sorted(ours_rates)[num_pairs // 2], 1),
        "peft_tokens_per_s": round(sorted(peft_rates)[num_pairs // 2], 1),
        "ratio": ratio.to_json(),
        "ten_adapters_over_base_only": lora_cost.to_json(),
        "control": control.to_json(),
        "control_spread": round(control.spread, 4),
    }


def judge(cell: dict[str, Any], device: str) -> dict[str, bool | None]:
    """Whether each bound of a cell holds; None = not judged, with a GPU or a noisy control."""
    batch = cell["batch"]
    label = f"{batch['num_requests']} requests"
    has_pairs = process_isa().has_bfloat16_dot
    required = batch["required_ratio"] if has_pairs else _REQUIRED_WITHOUT_PAIRS
    bounds = {
        f"{label} >= {required} x PEFT": cell["ratio"]["low"] >= required,
        f"{label}: ten adapters >= {REQUIRED_OVER_BASE_ONLY} x base only": (
            cell["ten_adapters_over_base_only"]["low"] >= REQUIRED_OVER_BASE_ONLY
        ),
    }
    is_noisy = cell["control_spread"] > MAX_CONTROL_SPREAD
    return dict.fromkeys(bounds) if is_noisy or device != "cpu" else dict(bounds)


def main() -> None:
    """Run all cells and print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=7)
    has_gpu = torch.cuda.is_available()
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if has_gpu else "cpu")
    arguments = parser.parse_args()
    device = arguments.device
    transformers_logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as directory:
        model = make_model(Path(directory) / "model")
        adapters = make_adapters(model, Path(directory) / "adapters")
        theirs = PeftRunner(model, adapters, device)
        with Engine(
            model=str(model),
            device=device,
            dtype="bfloat16",
            lora_dir=str(Path(directory) / "adapters"),
            preload=("all",),
        ) as engine:
            print("\n".join(engine.get_model_info().summary), flush=True)
            ours = CorunRunner(engine)
            cells = [measure(batch, ours, theirs, arguments.pairs) for batch in BATCHES]
    bounds = {name: held for cell in cells for name, held in judge(cell, device).items()}
    workload = {"ranks": RANKS, "model": "llama-150m bf16", "device": device}
    report("against_peft", workload, {"cells": cells}, bounds)


if __name__ == "__main__":
    main()

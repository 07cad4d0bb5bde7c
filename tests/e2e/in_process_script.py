"""A user's script, without a main guard: ``Engine`` and ``AsyncEngine`` under a running loop.

Prints their answers, and changes of the process's global state.
"""

import asyncio
import json
import logging
import os
import signal
import sys
import threading
import warnings
from typing import Any

import numba
import torch
from corun import AsyncEngine, Engine, LoRARequest, SamplingParams
from corun.runtime.demo import chat_prompt, demo_adapters_path
from transformers import LlamaForCausalLM  # noqa: F401 -- its imports add filters of warnings

GREEDY = SamplingParams(temperature=0, max_tokens=24)


def global_state() -> dict[str, Any]:
    """Return the state that other code in this process may depend on."""
    root = logging.getLogger()
    return {
        "torch threads": torch.get_num_threads(),
        "threads of numba here": numba.get_num_threads(),
        "torch interop threads": torch.get_num_interop_threads(),
        "default dtype": str(torch.get_default_dtype()),
        "grad": torch.is_grad_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "random": hash(torch.get_rng_state().numpy().tobytes()),
        "signals": [str(signal.getsignal(number)) for number in sorted(signal.valid_signals())],
        "handlers": [str(handler) for handler in root.handlers],
        "log level": root.level,
        "environment": hash(str(sorted(os.environ.items()))),
        "directory": os.getcwd(),
        "hooks": [str(sys.excepthook), str(threading.excepthook), str(sys.unraisablehook)],
        "warning filters": len(warnings.filters),
    }


def upper(name: str = "upper") -> LoRARequest:
    return LoRARequest(name, 1, str(demo_adapters_path() / "upper"))


async def use_both() -> list[str]:
    with Engine() as engine:
        (first,) = engine.generate(chat_prompt("in a loop"), GREEDY, upper())
    async with AsyncEngine() as async_engine:
        last = None
        async for output in async_engine.generate(chat_prompt("in a loop"), GREEDY, lora_request="reverse"):
            last = output
        assert last is not None
    return [first.outputs[0].text, last.outputs[0].text]


torch_threads: list[int] = []  # each call's value
set_num_threads = torch.set_num_threads


def note_num_threads(nthreads: int) -> None:
    torch_threads.append(nthreads)
    set_num_threads(nthreads)


torch.set_num_threads = note_num_threads
numba.get_num_threads()  # the first question starts numba's threads, which moves OMP_NUM_THREADS
before = global_state()
answers = asyncio.run(use_both())
after = global_state()
changed = [name for name, value in before.items() if after[name] != value]
with Engine(cpu_threads=1):
    pass
threads = [thread.name for thread in threading.enumerate() if thread.name.startswith("corun")]
json.dump(
    {"answers": answers, "changed": changed, "torch threads": torch_threads, "threads": threads}, sys.stdout
)

"""Beyond windows and other thresholds the engine answers what transformers + PEFT answer."""

import random
from dataclasses import replace
from typing import Any

import pytest
from corun import Engine, LoRARequest, SamplingParams
from support.architectures import THRESHOLD, WITH_THRESHOLDS
from support.parity import (
    ADAPTER_SPECS,
    MAX_LOGPROBS,
    VOCAB_SIZE,
    ParityCase,
    largest_error,
)

pytestmark = pytest.mark.usefixtures("one_torch_thread")

MAX_RELATIVE_ERROR = 1e-4
GREEDY = SamplingParams(temperature=0, max_tokens=6, logprobs=MAX_LOGPROBS, ignore_eos=True)
OPTIONS: dict[str, Any] = {
    "device": "cpu", "dtype": "float32", "block_size": 4, "max_num_batched_tokens": 23,
    "memory_gib": 0.05,
}  # fmt: skip
# PEFT makes adapters of experts, which are not served, of names in a feed-forward.
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
TARGETS = {"jetmoe": ("kv_proj",)}  # its other projections are experts


@pytest.fixture(scope="module", params=WITH_THRESHOLDS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ParityCase:
    options = {"target_modules": TARGETS.get(request.param, ATTENTION)}
    specs = [replace(spec, options={**spec.options, **options}) for spec in ADAPTER_SPECS]
    return ParityCase(request.param, tmp_path_factory.mktemp(request.param), specs=specs)


def test_in_chunks_and_from_kept_prefixes(case: ParityCase) -> None:
    """Prompts within and beyond, together, twice: the second time over the prefix cache."""
    rng = random.Random(4)
    names = [None, *case.adapters, None]
    prompts = [
        [rng.randrange(3, VOCAB_SIZE) for _ in range(num)] for num in (90, 35, 36, 37, 61, 5)
    ][: len(names)]
    loras = [name and LoRARequest(name, 1, str(case.adapters[name])) for name in names]
    with Engine(model=str(case.directory), **OPTIONS) as engine:
        for is_known in (False, True):
            outputs = engine.generate(prompts, [GREEDY] * len(prompts), loras)
            for name, output in zip(names, outputs, strict=True):
                assert largest_error(case, output, name) < MAX_RELATIVE_ERROR
            found = max(output.outputs[0].num_cached_tokens for output in outputs)
            assert (found > THRESHOLD) == is_known

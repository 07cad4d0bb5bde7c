"""Beyond windows and other thresholds the engine answers like transformers + PEFT."""

import functools
import json
import random
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from corun import Engine, LoRARequest, SamplingParams
from corun.runtime.errors import ConfigError, RequestError
from support.architectures import WITH_THRESHOLDS
from support.parity import ADAPTER_SPECS, MAX_LOGPROBS, VOCAB_SIZE, ParityCase, largest_error
from support.rounding import RoundingErrors, rounding_errors

pytestmark = pytest.mark.usefixtures("one_torch_thread")

MAX_RELATIVE_ERROR = 1e-4
NUM_SEEDS = 20
NOISE_FACTOR = 1.5  # of the largest error that plain transformers makes in the same type
MIN_SEPARATION = 2.0  # an error without the window is this many times the limit, or more
GREEDY = SamplingParams(temperature=0, max_tokens=6, logprobs=MAX_LOGPROBS, ignore_eos=True)
OPTIONS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "block_size": 4, "memory_gib": 0.05}
# PEFT makes adapters of experts, which are not served, of names in a feed-forward.
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
TARGETS = {"jetmoe": ("kv_proj",)}  # its other projections are experts


@pytest.fixture(scope="module", params=sorted(WITH_THRESHOLDS.keys() - {"llama4"}))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ParityCase:
    return attention_case(request.param, tmp_path_factory.mktemp(request.param))


def attention_case(name: str, directory: Path) -> ParityCase:
    options = {"target_modules": TARGETS.get(name, ATTENTION)}
    specs = [replace(spec, options={**spec.options, **options}) for spec in ADAPTER_SPECS]
    return ParityCase(name, directory, specs=specs)


def test_in_chunks_and_from_kept_prefixes(case: ParityCase) -> None:
    """Prompts within and beyond, together, twice: the second time over the prefix cache."""
    rng = random.Random(4)
    names = [None, *case.adapters, None]
    prompts = [[rng.randrange(3, VOCAB_SIZE) for _ in range(num)] for num in (90, 35, 36, 37, 61, 5)]
    answer_twice(case, prompts, names, max_num_batched_tokens=23)


def answer_twice(case: ParityCase, prompts: list[list[int]], names: list[str | None], **options: Any) -> None:
    loras = [name and LoRARequest(name, 1, str(case.adapters[name])) for name in names]
    with Engine(model=str(case.directory), **OPTIONS, **options) as engine:
        for is_known in (False, True):
            outputs = engine.generate(prompts, [GREEDY] * len(prompts), loras)
            for name, output in zip(names, outputs, strict=True):
                assert largest_error(case, output, name) < MAX_RELATIVE_ERROR
            found = max(output.outputs[0].num_cached_tokens for output in outputs)
            assert (found >= 4 * max(map(len, prompts)) // 5) == is_known


@pytest.fixture(scope="module")
def llama4(tmp_path_factory: pytest.TempPathFactory) -> ParityCase:
    return attention_case("llama4", tmp_path_factory.mktemp("llama4"))


def test_up_to_where_llama4_counts_tokens_of_a_step(
    llama4: ParityCase, caplog: pytest.LogCaptureFixture
) -> None:
    """Its temperature begins at 36 tokens of a request or of a step, and its chunks at 48."""
    rng = random.Random(5)
    names = [None, *llama4.adapters, None]
    lengths = (29, 28, 20, 29, 7, 29)  # and 6 more tokens each
    prompts = [[rng.randrange(3, VOCAB_SIZE) for _ in range(num)] for num in lengths]
    with caplog.at_level("WARNING"):
        answer_twice(llama4, prompts, names, max_num_batched_tokens=512)
    assert "is exact up to 35 tokens: at floor_scale = 36" in caplog.text
    with Engine(model=str(llama4.directory), **OPTIONS) as engine, pytest.raises(RequestError, match="35"):
        engine.generate([prompts[0] + prompts[1]], GREEDY)


def test_a_longer_context_is_refused(llama4: ParityCase) -> None:
    reason = "is 36, but corun serves this model correctly only up to 35"
    with pytest.raises(ConfigError, match=reason):
        Engine(model=str(llama4.directory), **OPTIONS, max_model_len=36)


def test_chunks_without_a_temperature(tmp_path: Path) -> None:
    """Chunked layers are served up to their first chunk's end, for any size of a step."""
    case = attention_case("llama4", tmp_path)
    config = json.loads((case.directory / "config.json").read_text())
    config |= {"attn_temperature_tuning": False, "floor_scale": 8192, "attention_chunk_size": 36}
    (case.directory / "config.json").write_text(json.dumps(config))
    rng = random.Random(6)
    prompts = [[rng.randrange(3, VOCAB_SIZE) for _ in range(num)] for num in (30, 30, 12)]
    answer_twice(case, prompts, [None] * 3, max_num_batched_tokens=512)
    reason = "is 37, but corun serves this model correctly only up to 36"
    with pytest.raises(ConfigError, match=reason):
        Engine(model=str(case.directory), **OPTIONS, max_model_len=37)


FULL = [pytest.param(seed, marks=pytest.mark.full) for seed in range(1, NUM_SEEDS)]


class MaskWindow:
    """Phimoe of one seed, with a window that only the mask states, and prompts beyond it."""

    def __init__(self, seed: int, directory: Path) -> None:
        self.case = ParityCase("phimoe-window", directory, seed=seed, specs=())
        rng = random.Random(seed)
        self._prompts = [[rng.randrange(3, VOCAB_SIZE) for _ in range(n)] for n in (40, 57, 70)]

    def answers(self, dtype: str) -> list[Any]:
        """The engine's answers, in chunks and then token by token."""
        options = {**OPTIONS, "dtype": dtype, "max_num_batched_tokens": 64}
        with Engine(model=str(self.case.directory), **options) as engine:
            return engine.generate(self._prompts, GREEDY)

    @functools.cached_property
    def half_errors(self) -> RoundingErrors:
        """Mean errors in bfloat16 at the tokens of the engine's answers."""
        return rounding_errors(self.case, self.answers("bfloat16"), without={"sliding_window": None})


@pytest.fixture(scope="module")
def windows(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], MaskWindow]:
    return functools.cache(lambda seed: MaskWindow(seed, tmp_path_factory.mktemp("phimoe")))


@pytest.mark.parametrize("seed", [0, *FULL])
def test_a_window_of_the_mask_alone(seed: int, windows: Callable[[int], MaskWindow]) -> None:
    window = windows(seed)
    errors = [largest_error(window.case, one, None) for one in window.answers("float32")]
    assert max(errors) < MAX_RELATIVE_ERROR


@pytest.mark.parametrize("seed", [0, *FULL])
def test_a_window_of_the_mask_alone_in_16_bits(seed: int, windows: Callable[[int], MaskWindow]) -> None:
    """The error is one that rounding makes in plain transformers, and not that of a lost window."""
    errors = windows(seed).half_errors
    limit = NOISE_FACTOR * max(errors.control)
    assert errors.ours < limit
    assert MIN_SEPARATION * limit < errors.without


@pytest.mark.full
def test_errors_of_many_seeds_together(windows: Callable[[int], MaskWindow]) -> None:
    """Which experts a rounding changes is chance; over many seeds no factor is needed."""
    errors = [windows(seed).half_errors for seed in range(NUM_SEEDS)]
    sums = [sum(run) for run in zip(*(one.control for one in errors), strict=True)]
    assert sum(one.ours for one in errors) <= statistics.median(sums)

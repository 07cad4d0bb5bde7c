"""Prefixes found in the cache give the same answers as computed ones, in float32."""

import random
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from corun import Engine, LoRARequest, SamplingParams
from corun.runtime.frontend.outputs import RequestOutput
from support.cold_engine import ColdEngine
from support.cold_parity import NAMES, check, make_case, prompts, split_at
from support.parity import (
    MAX_LOGPROBS,
    VOCAB_SIZE,
    AdapterSpec,
    HalfErrors,
    ParityCase,
    ask_turns,
    check_exact,
)
from support.peft_adapters import edit_config

pytestmark = pytest.mark.usefixtures("one_torch_thread")

MAX_OVER_PEFT = 1.1  # mean error in bfloat16
BLOCK_SIZE = 4
PROMPT_TOKENS = 22
NUM_OUTPUT_TOKENS = 7
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_OUTPUT_TOKENS, logprobs=MAX_LOGPROBS, ignore_eos=True)
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "block_size": BLOCK_SIZE,
    "max_num_batched_tokens": 16,
    "memory_gib": 0.05,
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> ParityCase:
    return ParityCase("llama3-rope", tmp_path_factory.mktemp("llama"))


@pytest.fixture
def engine(llama: ParityCase) -> Iterator[Engine]:
    with Engine(model=str(llama.directory), device="cpu", **OPTIONS) as made:
        yield made


def prompt_of(seed: int, num_tokens: int = PROMPT_TOKENS) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, VOCAB_SIZE) for _ in range(num_tokens)]


def ask(
    case: ParityCase,
    engine: Engine,
    prompts: Sequence[list[int]],
    names: Sequence[str | None],
    **options: Any,
) -> list[RequestOutput]:
    """Answers, compared with the truth of the named adapters."""
    outputs = engine.generate(list(prompts), GREEDY, case.loras(names), **options)
    check_exact(case, list(zip(names, outputs, strict=True)))
    return outputs


def num_found(outputs: Sequence[RequestOutput]) -> list[int]:
    return [choice.num_cached_tokens for output in outputs for choice in output.outputs]


def test_a_prompt_that_is_known_whole_still_computes_its_last_token(
    llama: ParityCase, engine: Engine
) -> None:
    prompt = prompt_of(1, 4 * BLOCK_SIZE)
    for found in (0, 3 * BLOCK_SIZE, 3 * BLOCK_SIZE):
        assert num_found(ask(llama, engine, [prompt], ["plain"])) == [found]


def test_requests_of_one_batch_share_what_others_have_computed_by_then(
    llama: ParityCase, engine: Engine
) -> None:
    """All begin alike, and go on apart; some are computed side by side and enter the same twice."""
    common = prompt_of(2)
    prompts = [[*common, *prompt_of(10 + number, 1 + number % 5)] for number in range(8)]
    names = [None, "plain", "rs", "plain", None, "plain", None, "plain"]
    ask(llama, engine, prompts, names)
    known = PROMPT_TOKENS // BLOCK_SIZE * BLOCK_SIZE
    again = num_found(ask(llama, engine, prompts, names))
    assert min(again) >= known


def test_other_adapters_and_other_salts_find_nothing(llama: ParityCase, engine: Engine) -> None:
    prompt = prompt_of(3)
    names = [None, *llama.adapters]
    ask(llama, engine, [prompt], [None], cache_salt="one tenant")
    for name in names:
        assert num_found(ask(llama, engine, [prompt], [name])) == [0]
    for salt, name in (("one tenant", "plain"), ("another", None)):
        assert num_found(ask(llama, engine, [prompt], [name], cache_salt=salt)) == [0]
    assert min(num_found(ask(llama, engine, [prompt], [None], cache_salt="one tenant"))) > 0


def test_a_name_with_other_content_finds_nothing_and_a_second_name_of_the_same_does(
    llama: ParityCase, engine: Engine
) -> None:
    prompt = prompt_of(4)
    names = list(llama.adapters)
    for path_name in (names[0], names[1], names[0]):
        request = LoRARequest("changing", 1, str(llama.adapters[path_name]))
        engine.add_lora(request)
        (output,) = engine.generate([prompt], GREEDY, request)
        check_exact(llama, [(path_name, output)])
        assert num_found([output]) == [0], "its last version has gone, with all that it had"
    known = (PROMPT_TOKENS - 1) // BLOCK_SIZE * BLOCK_SIZE
    assert num_found(ask(llama, engine, [prompt], [names[0]])) == [known], "the same content"


def test_the_same_tensors_with_another_scale_find_nothing(tmp_path: Path) -> None:
    case = ParityCase("llama3-rope", tmp_path, specs=[AdapterSpec("plain", {"r": 4})])
    case.adapters["rescaled"] = tmp_path / "adapters" / "rescaled"
    shutil.copytree(case.adapters["plain"], case.adapters["rescaled"])
    edit_config(case.adapters["rescaled"], lora_alpha=24)
    with Engine(model=str(case.directory), device="cpu", **OPTIONS) as engine:
        prompt = prompt_of(6)
        for name in case.adapters:
            assert num_found(ask(case, engine, [prompt], [name])) == [0]
        assert min(num_found(ask(case, engine, [prompt], ["rescaled"]))) > 0


def test_contexts_on_either_side_of_the_longrope_threshold_share_nothing(tmp_path: Path) -> None:
    """The same tokens have other KV in a long context; a request that grows into one has both."""
    case = ParityCase("phi3-longrope", tmp_path)
    threshold_tokens = 24
    prompt = prompt_of(7, 33)
    short, long, grows = prompt[:13], prompt, prompt[: threshold_tokens - 3]
    assert len(short) + NUM_OUTPUT_TOKENS < threshold_tokens
    expected = [(short, 0), (short, 12), (long, 0), (grows, 12), (short, 12), (long, 32)]
    with Engine(model=str(case.directory), device="cpu", **OPTIONS) as engine:
        for name in (None, "plain"):
            for asked, num_tokens in expected:
                assert num_found(ask(case, engine, [asked], [name])) == [num_tokens]
            (output,) = ask(case, engine, [grows], [name])
            assert num_found([output]) == [20], "of its short beginning"
            turn = [*grows, *output.outputs[0].token_ids, 5]
            assert num_found(ask(case, engine, [turn], [name])) == [24], "of its long rest"


def test_those_that_were_preempted_go_on_behind_what_they_had(llama: ParityCase) -> None:
    num_blocks, params = 30, replace(GREEDY, max_tokens=20)
    memory_bytes = num_blocks * llama.kv_block_bytes(BLOCK_SIZE, torch.float32)
    options = {**OPTIONS, "memory_gib": memory_bytes / 2**30, "growth_headroom": 0.0}
    prompts = [prompt_of(20 + number, 10) for number in range(8)]
    with Engine(
        model=str(llama.directory), device="cpu", max_model_len=40, scheduling_policy="fcfs", **options
    ) as engine:
        outputs = engine.generate(prompts, params, predicted_output_tokens=1)
        assert engine.get_stats().num_preemptions > 2
    check_exact(llama, [(None, output) for output in outputs])


def test_turns_in_bfloat16_are_as_near_as_peft(llama: ParityCase) -> None:
    errors = HalfErrors(llama)
    names = [None, *llama.adapters]
    prompts = [prompt_of(30 + number) for number in range(len(names))]
    options = {**OPTIONS, "dtype": "bfloat16"}
    with Engine(model=str(llama.directory), device="cpu", **options) as engine:
        answers = ask_turns(engine, llama, names, prompts, GREEDY, num_turns=3)
    for name, output in answers:
        errors.add_output(name, output)
    errors.check(MAX_OVER_PEFT)


@pytest.mark.parametrize("prefix_cache", ["on", "off"])
def test_seeded_samples_do_not_depend_on_what_was_found(llama: ParityCase, prefix_cache: str) -> None:
    params = SamplingParams(n=2, temperature=1.0, seed=5, max_tokens=9, ignore_eos=True)
    prompt = prompt_of(5)
    with Engine(model=str(llama.directory), device="cpu", prefix_cache=prefix_cache, **OPTIONS) as engine:
        first, second = (engine.generate([prompt], params)[0] for _ in range(2))
    assert [c.token_ids for c in first.outputs] == [c.token_ids for c in second.outputs]
    assert (min(num_found([second])) > 0) == (prefix_cache == "on")


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> ParityCase:
    return make_case(tmp_path_factory.mktemp("deep"))


def test_a_cold_request_begins_behind_a_prefix(deep: ParityCase, tmp_path: Path) -> None:
    """Its KV is on the device although its adapter is evicted, as in some memory policies.

    What is new is computed by workers.
    """
    name = NAMES[0]
    with ColdEngine(
        deep.directory,
        {name: deep.adapters[name]},
        tmp_path,
        delta_backend="numpy",
        prefix_cache="on",
        memory_policy="static-split",
    ) as engine:
        prompt = prompts(1, seed=31, num_tokens=18)[0]
        first = engine.ask(name, prompt)
        check(deep, engine.run())
        engine.cool(name)
        engine.plans.clear()
        with engine.chunks(split_at(3, 9)):
            engine.ask(name, [*prompt, *first.token_ids, 5, 6, 7])
            answers = engine.run()
        starts = [start for batch in engine.assisted for start in batch.start_positions]
        assert starts and min(starts) >= len(prompt)
        check(deep, answers)
        engine.check_nothing_is_held()

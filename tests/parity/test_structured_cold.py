"""Cold requests with grammars, computed by workers and preempted, follow them as warm ones do."""

import re
from pathlib import Path
from typing import Any

import pytest
from corun.runtime.grammar.tokenizer import TokenTree, trial_tokenizer
from support.byte_grammars import regex
from support.cold_engine import Answer, ColdEngine
from support.cold_parity import NUM_LAYERS, make_case, prompts, split_at

MEMORY_BYTES = 140_000  # PAIR takes 115 kB and leaves 12 blocks of 4 tokens
PAIR = ("patterns", "attention")
PATTERN = "A[0-9]B(00|11)[C-E]{2}F[0-9]G"
NUM_TOKENS = 10


def text_of(answer: Answer) -> str:
    return "".join(map(chr, answer.token_ids))


@pytest.fixture(autouse=True)
def _byte_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a token stand for the byte of its id; the model's own are words."""
    monkeypatch.setattr(TokenTree, "get", lambda *_: trial_tokenizer(96, {}))


def check_all(answers: list[Answer]) -> None:
    for answer in answers:
        assert (answer.error, answer.finish_reason) == (None, "stop")
        assert len(answer.token_ids) == NUM_TOKENS
        assert re.fullmatch(PATTERN, text_of(answer)), text_of(answer)


@pytest.mark.parametrize("memory_bytes", [MEMORY_BYTES, 4 * MEMORY_BYTES])
def test_cold_rows_follow_their_grammars(tmp_path: Path, memory_bytes: int) -> None:
    case = make_case(tmp_path / "deep")
    params: dict[str, Any] = {"predicted_output_tokens": 1, "structured_output": regex(PATTERN)}
    adapters = {name: case.adapters[name] for name in PAIR}
    # Each twice: with forced tokens, and with all tokens drawn.
    questions = 2 * list(zip((*PAIR, PAIR[0]), prompts(3, seed=10, num_tokens=16), strict=True))
    with ColdEngine(
        case.directory,
        adapters,
        tmp_path,
        delta_backend="numpy",
        memory_gib=memory_bytes / 2**30,
        max_model_len=48,
    ) as engine:
        with engine.held_loads(), engine.chunks(split_at(NUM_LAYERS, 9)):
            asked = [
                engine.ask(name, prompt, max_tokens=12, structured_forced_tokens=number < 3, **params)
                for number, (name, prompt) in enumerate(questions)
            ]
            engine.run_until(lambda: all(answer.finish_reason for answer in asked))
            engine.release_loads()
            engine.run()
        was_preempted = engine.core.stats().num_preemptions > 0
        assert was_preempted == (memory_bytes == MEMORY_BYTES)
        assert engine.num_assisted_rows > 0
        warm = engine.ask(PAIR[0], prompts(1, seed=10, num_tokens=16)[0], max_tokens=12, **params)
        engine.run()
    check_all([*asked, warm])
    for forced, drawn in zip(asked[:3], asked[3:], strict=True):
        assert forced.token_ids == drawn.token_ids


def test_rows_whose_blocks_come_back_from_the_host_follow_their_grammars(tmp_path: Path) -> None:
    case = make_case(tmp_path / "deep")
    adapters = {PAIR[0]: case.adapters[PAIR[0]]}
    with ColdEngine(
        case.directory,
        adapters,
        tmp_path,
        delta_backend="numpy",
        load_strategy="async_load",
        memory_gib=MEMORY_BYTES / 2**30,
        max_model_len=48,
        prefix_cache="on",
        host_bytes="4MiB",
        link_gib_per_s=1.0,
        memory_policy="lru",
    ) as engine:
        answers: list[Answer] = []
        for _ in range(3):
            answers += [
                engine.ask(
                    PAIR[0],
                    prompt,
                    max_tokens=12,
                    predicted_output_tokens=1,
                    structured_output=regex(PATTERN),
                )
                for prompt in prompts(12, seed=11, num_tokens=24)
            ]
            engine.run()
        assert engine.num_host_cached_tokens > 0 and engine.core.stats().num_preemptions > 0
    check_all(answers)

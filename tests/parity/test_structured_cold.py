"""Cold requests with grammars, computed by workers and preempted, follow them as warm ones do."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from corun.runtime.grammar.tokenizer import trial_tokenizer
from support.byte_grammars import regex
from support.cold_engine import Answer, ColdEngine
from support.cold_parity import NUM_LAYERS, make_case, prompts, split_at

MEMORY_BYTES = 140_000  # PAIR takes 115 kB and leaves 12 blocks of 4 tokens
PAIR = ("patterns", "attention")
PATTERN = "A[0-9]B(00|11)[C-E]{2}F[0-9]G"
NUM_TOKENS = 10


def text_of(answer: Answer) -> str:
    return "".join(map(chr, answer.token_ids))


@pytest.mark.parametrize("memory_bytes", [MEMORY_BYTES, 4 * MEMORY_BYTES])
def test_cold_rows_follow_their_grammars(
    tmp_path: Path, memory_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = make_case(tmp_path / "deep")
    params: dict[str, Any] = {"predicted_output_tokens": 1, "structured_output": regex(PATTERN)}
    adapters = {name: case.adapters[name] for name in PAIR}
    with ColdEngine(
        case.directory, adapters, tmp_path, delta_backend="numpy",
        memory_gib=memory_bytes / 2**30, max_model_len=48,
    ) as engine:  # fmt: skip
        # The model's tokens are words; a token below 96 is here the byte of its id.
        tree = SimpleNamespace(get=lambda _: trial_tokenizer(96, {}))
        monkeypatch.setattr(engine.parts.grammars, "_tree", tree)
        with engine.held_loads(), engine.chunks(split_at(NUM_LAYERS, 9)):
            asked = [
                engine.ask(name, prompt, max_tokens=12, **params)
                for name, prompt in zip(PAIR * 3, prompts(6, seed=10, num_tokens=16), strict=True)
            ]
            engine.run_until(lambda: all(answer.finish_reason for answer in asked))
            engine.release_loads()
            engine.run()
        was_preempted = engine.core.stats().num_preemptions > 0
        assert was_preempted == (memory_bytes == MEMORY_BYTES)
        assert engine.num_assisted_rows > 0
        warm = engine.ask(PAIR[0], prompts(1, seed=10, num_tokens=16)[0], max_tokens=12, **params)
        engine.run()
    for answer in (*asked, warm):
        assert (answer.error, answer.finish_reason) == (None, "stop")
        assert len(answer.token_ids) == NUM_TOKENS
        assert re.fullmatch(PATTERN, text_of(answer)), text_of(answer)

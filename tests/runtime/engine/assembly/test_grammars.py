"""The grammars of an engine, from its tokenizer and its end tokens."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from corun.gpu.model.generation import GenerationDefaults
from corun.runtime.engine.assembly.build import make_grammars
from corun.runtime.engine.tokenizer import read_tokenizer
from support.byte_grammars import regex
from support.tokenizers import save_sample_tokenizer

NUM_IDS = 500


@pytest.mark.parametrize("ends", [(1,), (), (NUM_IDS + 7,)])
def test_a_model_needs_no_end_token_of_its_tokenizer(ends: tuple[int, ...], tmp_path: Path) -> None:
    save_sample_tokenizer("byte level", tmp_path)
    tokenizer = read_tokenizer(str(tmp_path), NUM_IDS)
    config: Any = SimpleNamespace(vocab_size=NUM_IDS)
    grammars = make_grammars(tokenizer, config, GenerationDefaults(ends, {}), lambda: None, ())
    grammars.start()
    matcher = grammars.matcher(regex("[0-9]"))
    bits = np.unpackbits(matcher.mask(ends, ends).view(np.uint8), bitorder="little")
    assert len(bits) >= NUM_IDS
    digits = [tokenizer.tokens.ids[digit] for digit in "0123456789"]
    assert set(digits) <= set(np.flatnonzero(bits).tolist())
    matcher.advance(np.array(digits[:1]))
    assert matcher.has_ended
    grammars.close()

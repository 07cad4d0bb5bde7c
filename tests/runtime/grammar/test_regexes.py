"""Random regular expressions: each answer that ends by itself matches as a whole."""

import random
import re

import numpy as np
import pytest
from corun.runtime.errors import RequestError
from corun.runtime.grammar.compile import check_structure, compile_grammar, parser_limits
from corun.runtime.grammar.tokenizer import trial_tokenizer
from corun.runtime.sampling import StructuredOutput
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher

TREE = trial_tokenizer(257, {})
MAX_ANSWER_BYTES = 200
ATOMS = ("a", "é", "[a-f]", "[^xyz]", r"\d", r"\.", "/", '"', " ", ".", r"[A-Z_-]", r"\s", "日本", r"\\")


def repeated(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    counts = st.sampled_from(["*", "+", "?", "{2}", "{1,3}", "{0,2}"])
    return st.one_of(
        st.builds("(?:{}){}".format, inner, counts),
        st.builds("(?:{}|{})".format, inner, inner),
        st.builds("{}{}".format, inner, inner),
    )


PATTERNS = st.recursive(st.sampled_from(ATOMS), repeated, max_leaves=8)


@settings(max_examples=200, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(PATTERNS, st.booleans(), st.integers(0, 2**32))
def test_answers_match(pattern: str, is_anchored: bool, seed: int) -> None:
    structured = StructuredOutput("regex", f"^{pattern}$" if is_anchored else pattern)
    check_structure(structured, TREE)
    matcher = LLMatcher(TREE, compile_grammar(structured), log_level=0, limits=parser_limits())
    rng, tokens = random.Random(seed), list[int]()
    while len(tokens) < MAX_ANSWER_BYTES:
        words = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        allowed = np.flatnonzero(np.unpackbits(words, bitorder="little")).tolist()
        if TREE.eos_token in allowed and (len(allowed) == 1 or rng.random() < 0.3):
            answer = TREE.decode_bytes(tokens).decode()
            assert re.fullmatch(pattern, answer), (pattern, answer)
            return
        drawn = rng.choice([one for one in allowed if one != TREE.eos_token])
        assert matcher.consume_token(drawn)
        tokens.append(drawn)


@pytest.mark.parametrize("pattern", [r"(a)\1", "a(?=b)", r"\ba", "(?<!a)b", "a^b"])
def test_what_cannot_be_followed_is_refused(pattern: str) -> None:
    with pytest.raises(RequestError, match="structured_output cannot be served"):
        check_structure(StructuredOutput("regex", pattern), TREE)

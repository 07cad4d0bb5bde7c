"""A trigger may be a token of its own, also one that only an adapter has."""

import json
from collections.abc import Mapping

from corun.runtime.grammar.compile import check_structure, compile_grammar, parser_limits
from corun.runtime.grammar.tags import with_trigger_ids
from corun.runtime.grammar.tokenizer import trial_tokenizer
from corun.runtime.sampling import StructuredOutput
from llguidance import LLMatcher

TREE = trial_tokenizer(1000, {300: "<|other|>"})
TAG = {
    "structures": [{"begin": "<|call|>f ", "schema": {"type": "integer"}, "end": "<|end|>"}],
    "triggers": ["<|call|>"],
}


def no_tokens() -> Mapping[int, str]:
    raise AssertionError("they are slow to list")


def test_both_the_token_and_its_text_begin_a_structure() -> None:
    tags = StructuredOutput("structural_tag", json.dumps(TAG))
    structured = with_trigger_ids(tags, lambda: {700: "<|call|>", 701: "<|else|>"})
    check_structure(structured, TREE)
    grammar = compile_grammar(structured)

    def allows(*parts: str | int) -> bool:
        matcher = LLMatcher(TREE, grammar, log_level=0, limits=parser_limits())
        tokens = list[int]()
        for part in parts:
            tokens += [part] if isinstance(part, int) else TREE.tokenize_bytes(part.encode())
        return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()

    assert allows("so: ", 700, "f 12<|end|> and ", 700, "f 3<|end|>.")
    assert allows("<|call|>f 1<|end|>") and allows("none")
    assert not (allows(700, "f x") or allows(701) or allows("<|call|>g"))


def test_all_else_stays_as_it_is() -> None:
    for kind, text in [
        ("regex", "a"),
        ("structural_tag", "{"),
        ("structural_tag", "[]"),
        ("structural_tag", '{"triggers": [[]]}'),
        ("structural_tag", '{"triggers": null}'),
    ]:
        structured = StructuredOutput(kind, text)
        assert with_trigger_ids(structured, no_tokens) is structured

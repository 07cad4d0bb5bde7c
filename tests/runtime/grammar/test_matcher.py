"""What a grammar allows after an output, where it may end, and after recomputation."""

import random

import numpy as np
import pytest
from corun.runtime.errors import StepFailedError
from corun.runtime.grammar.compile import compile_grammar, start_matcher
from corun.runtime.grammar.matcher import Matcher
from corun.runtime.grammar.tokenizer import trial_tokenizer
from corun.runtime.sampling import StructuredOutput
from llguidance import LLMatcher, LLParserLimits
from support.byte_grammars import byte_matcher, regex

END, STOP = 2, 3


def tokens(text: str) -> np.ndarray:
    return np.array(list(text.encode()), dtype=np.int64)


def after(matcher: Matcher, text: str) -> Matcher:
    matcher.advance(tokens(text))
    return matcher


def allowed(matcher: Matcher, ends: tuple[int, ...] = (END,), drawable: tuple[int, ...] = (END,)) -> str:
    """The allowed tokens as text; end tokens as dots."""
    words = matcher.mask(ends, drawable)
    ids = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
    return "".join("." if one in ends else chr(one) for one in ids)


def test_end_tokens_follow_only_where_the_grammar_may_end() -> None:
    matcher = byte_matcher(regex("ab*"))
    assert (allowed(matcher), matcher.may_end) == ("a", False)
    assert (allowed(after(matcher, "a")), matcher.may_end) == (".b", True)
    assert allowed(matcher, (END, STOP)) == ".b"
    assert allowed(matcher, (END, STOP), (END, STOP)) == "..b"


def test_an_end_token_beyond_the_tree_is_an_adapters() -> None:
    beyond = 1000
    matcher = byte_matcher(regex("ab*"))
    ends = (END, beyond)
    assert allowed(matcher, ends, ends) == "a"
    assert allowed(after(matcher, "a"), ends, ends) == ".b."
    assert allowed(after(matcher, "ab"), ends, (END,)) == ".b", "its bit is not left over"


def test_end_tokens_that_are_held_back_follow_where_nothing_else_can() -> None:
    assert allowed(after(byte_matcher(regex("ab*")), "a"), drawable=()) == "b"
    assert allowed(after(byte_matcher(regex("ab")), "ab"), drawable=()) == "."
    assert allowed(byte_matcher(regex("")), drawable=()) == "."


@pytest.mark.parametrize(
    ("pattern", "before", "forced"),
    [
        ("abc[d-f]gh", "a", "bc"),
        ("abc[d-f]gh", "abcd", "gh"),  # to the end
        ("abc[d-f]gh", "abc", ""),
        ("ab*c", "a", ""),
        ("(abc)?", "", ""),  # it may end
        ("(abc)?", "a", "bc"),
    ],
)
def test_text_without_a_choice_is_forced(pattern: str, before: str, forced: str) -> None:
    matcher = byte_matcher(regex(pattern))
    for _ in range(2):  # nothing is consumed
        assert "".join(map(chr, matcher.forced(tokens(before)))) == forced
    assert matcher.is_at(tokens(""))


def test_a_long_text_is_forced_in_parts() -> None:
    text = "".join(chr(97 + index % 26) for index in range(5000))
    matcher, output = byte_matcher(regex(text + "(x|y)")), text[:1]
    parts = []
    while forced := "".join(map(chr, matcher.forced(tokens(output)))):
        parts.append(len(forced))
        output += forced
    assert output == text and parts == [2048, 2048, 903]


def test_a_search_that_exceeds_its_limits_ends_forcing_and_not_the_answer() -> None:
    text = '"abcdefghijklmnop"'
    tree = trial_tokenizer(257, {})
    structured = StructuredOutput("json_schema", '{"const": "abcdefghijklmnop"}')
    grammar, limits = compile_grammar(structured), LLParserLimits(initial_lexer_fuel=10)
    forcing = LLMatcher(tree, grammar, log_level=0, limits=limits)
    matcher = Matcher(start_matcher(structured, tree), tree, Matcher(forcing, tree))
    first = "".join(map(chr, matcher.forced(tokens(text[:2]))))
    assert len(first) < 8 and text[2:].startswith(first)
    for length in range(10, len(text)):
        assert matcher.forced(tokens(text[:length])) == []
        assert allowed(after(matcher, text[:length])) == text[length]


def test_an_end_token_that_is_also_text_does_not_cut_an_answer() -> None:
    """An end token of an adapter may be a newline, which JSON allows."""
    newline = ord("\n")
    assert allowed(after(byte_matcher(regex("a[\n ]b")), "a"), (newline,), (newline,)) == " "
    # Without it the answer cannot continue: then it is text.
    assert allowed(after(byte_matcher(regex("a\nb")), "a"), (newline,), (newline,)) == "."


@pytest.mark.parametrize(("text", "has_ended"), [("a", False), ("ab", False), ("abc", True)])
def test_an_answer_has_ended_where_nothing_can_continue_it(text: str, has_ended: bool) -> None:
    assert after(byte_matcher(regex("ab*c")), text).has_ended is has_ended
    assert not after(byte_matcher(regex("ab*c*")), text).has_ended


def test_it_is_a_function_of_the_output() -> None:
    """Outputs in any order, as after rows that are computed again, against a new matcher each."""
    rng, followed = random.Random(0), byte_matcher(regex("(ab|cd|ce)*f?"))
    for _ in range(200):
        output = "".join(rng.choice(["ab", "cd", "ce"]) for _ in range(rng.randrange(4)))
        output = output[: rng.randrange(len(output) + 1)]
        assert allowed(after(followed, output)) == allowed(
            after(byte_matcher(regex("(ab|cd|ce)*f?")), output)
        )


def test_copies_of_a_grammar_do_not_share_an_output() -> None:
    first = byte_matcher(regex("ab|cd"))
    second = byte_matcher(regex("ab|cd"))
    after(first, "a")
    assert (allowed(first), allowed(second)) == ("b", "ac")


def test_tokens_that_the_grammar_forbids_are_an_error_until_it_starts_again() -> None:
    matcher = byte_matcher(regex("ab"))
    with pytest.raises(StepFailedError, match="grammar of the answer failed"):
        after(matcher, "b")
    assert allowed(after(matcher, "a")) == "b"

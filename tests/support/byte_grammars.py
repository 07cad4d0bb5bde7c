"""Matchers of regexes over single bytes, whose ids are their values."""

from corun.runtime.grammar.compile import start_forcing, start_matcher
from corun.runtime.grammar.matcher import Matcher
from corun.runtime.grammar.tokenizer import trial_tokenizer
from corun.runtime.sampling import StructuredOutput

_TREE = trial_tokenizer(257, {})


def byte_matcher(structured: StructuredOutput) -> Matcher:
    """A matcher at the start of an answer."""
    forcing = Matcher(start_forcing(structured, _TREE), _TREE)
    return Matcher(start_matcher(structured, _TREE), _TREE, forcing)


def regex(text: str) -> StructuredOutput:
    """An answer that matches ``text``."""
    return StructuredOutput("regex", text)

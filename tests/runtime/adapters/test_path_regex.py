"""Patterns over module paths, compared with ``re``."""

import re

import pytest
from corun.runtime.adapters.path_regex import PathRegex
from hypothesis import given
from hypothesis import strategies as st

# As adapters of vision models are saved by tools that train their language part.
_FIELD = (
    r"(?:.*?(?:language|text).*?(?:self_attn|attention|attn|mlp|feed_forward|ffn|dense).*?"
    r"(?:k_proj|v_proj|q_proj|out_proj|fc1|fc2|gate_proj|up_proj|down_proj).*?)|"
    r"(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|attention|mlp)\.(?:(?:k_proj|v_proj|q_proj)))"
)
_PIECES = [
    "a", "b", ".", r"\.", r"\d", r"\w", r"\W", r"\s", r"\D", r"\S", "[ab]", "[^a.]", "[0-9x]", "a*",
    "b+?", ".*", ".*?", "(?:a|ab)*", "(a|b)?", "(?:ab){2}", "(?:a?){3}", "(?:a*)*", "(?:.{0,2}b)+",
    "^", "$", r"\b", r"\B", "(?=a)", "(?!.*b)", "|", "x|", r"\Z", r"\A", "(?:)",
]  # fmt: skip
patterns = st.lists(st.sampled_from(_PIECES), max_size=6).map("".join)


@given(pattern=patterns, text=st.text("ab.1_ \n", min_size=1, max_size=8))
def test_says_what_re_says(pattern: str, text: str) -> None:
    regex = PathRegex(pattern)
    assert regex.fullmatch(text) == (re.fullmatch(pattern, text) is not None)
    assert regex.match(text) == (re.match(pattern, text) is not None)


@pytest.mark.parametrize(
    "path",
    [
        "model.language_model.layers.10.self_attn.q_proj",
        "model.layers.3.self_attn.k_proj",
        "model.visual.blocks.0.mlp.fc1",
        "model.layers.3.mlp.up_proj.extra",
    ],
)
def test_patterns_of_the_field(path: str) -> None:
    assert PathRegex(_FIELD).fullmatch(path) == (re.fullmatch(_FIELD, path) is not None)


@pytest.mark.parametrize("pattern", ["(a+)+b", "(a|a)*b", "(a|aa)+b", ".*" * 40 + "b", "a?" * 90])
def test_hostile_patterns_end(pattern: str) -> None:
    """With ``re`` each of these runs for years."""
    assert not PathRegex(pattern).fullmatch("a" * 100)


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("(", "not a regular expression"),
        ("(a)\\1", "groupref"),
        ("(?<=a)b", "assert"),
        ("(?>a)b", "atomic"),
        ("a++b", "possessive"),
        ("(?i)a", "flags"),
        ("(?i:a)", "flags"),
        ("a{1000}", "256"),
        ("a" * 5000, "4096"),
    ],
)
def test_refusals_say_why(pattern: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        PathRegex(pattern)

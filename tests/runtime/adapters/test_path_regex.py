"""Patterns over module paths, compared with ``re``."""

import contextlib
import re
from collections import deque

import pytest
from corun.runtime.adapters import path_regex
from corun.runtime.adapters.path_regex import Found, PathPatterns, PathRegex
from hypothesis import given
from hypothesis import strategies as st

# As saved by tools that train the language part of vision models.
_FIELD = (
    r"(?:.*?(?:language|text).*?(?:self_attn|attention|attn|mlp|feed_forward|ffn|dense).*?"
    r"(?:k_proj|v_proj|q_proj|out_proj|fc1|fc2|gate_proj|up_proj|down_proj).*?)|"
    r"(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|attention|mlp)\.(?:(?:k_proj|v_proj|q_proj)))"
)
_PIECES = [
    "a",
    "b",
    ".",
    r"\.",
    r"\d",
    r"\w",
    r"\W",
    r"\s",
    r"\D",
    r"\S",
    "[ab]",
    "[^a.]",
    "[0-9x]",
    "a*",
    "b+?",
    ".*",
    ".*?",
    "(?:a|ab)*",
    "(a|b)?",
    "(?:ab){2}",
    "(?:a?){3}",
    "(?:a*)*",
    "(?:.{0,2}b)+",
    "^",
    "$",
    r"\b",
    r"\B",
    "(?=a)",
    "(?!.*b)",
    "|",
    "x|",
    r"\Z",
    r"\A",
    "(?:)",
    "(?<=a)",
    "(?<!b)",
    "(?>a|ab)",
    "a++",
    ".?+",
    "(?i:B)",
    "(a)?(?(1)b|.)",
    r"(?:(b|a)\1)?",
    r"\{",
]
patterns = st.lists(st.sampled_from(_PIECES), max_size=6).map("".join)


def _span(found: re.Match[str] | Found) -> tuple[int, int] | None:
    return None if found is None else found.span()


@given(pattern=patterns, text=st.text("ab.1_ \n", min_size=1, max_size=8))
def test_says_what_re_says(pattern: str, text: str) -> None:
    regex = PathRegex(pattern)
    assert _span(regex.fullmatch(text)) == _span(re.fullmatch(pattern, text))
    assert _span(regex.match(text)) == _span(re.match(pattern, text))


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
    assert _span(PathRegex(_FIELD).fullmatch(path)) == _span(re.fullmatch(_FIELD, path))


@pytest.mark.parametrize("pattern", ["(a+)+b", "(a|a)*b", "(a|aa)+b", ".*" * 40 + "b", "a?" * 90])
def test_hostile_patterns_end(pattern: str) -> None:
    """With ``re`` each of these runs for years."""
    with contextlib.suppress(TimeoutError):
        assert PathRegex(pattern).fullmatch("a" * 100) is None


def test_what_takes_too_long_is_named() -> None:
    with pytest.raises(TimeoutError, match=r"'\(a\|aa\)\+\$' takes longer than 0.1 s to match aaa"):
        PathRegex("(a|aa)+$").match("a" * 100 + "!")


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("(", "not a regular expression"),
        ("(?<=a*)b", "fixed-width"),
        (r"\p{L}", "not served"),
        (r"\pL", "bad escape"),
        ("(?R)", "not a regular expression"),
        ("a{e<=1}", "not served"),
        (r"\\{i}", "not served"),
        ("[[:alpha:]]", "not served"),
        ("a{2,1}", "not a regular expression"),
        ("(?:(?:a{1000}){1000}){1000}", "100000"),
        ("(" * 2000 + ")" * 2000, "not a regular expression"),
        ("a" * 5000, "4096"),
    ],
)
def test_refusals_say_why(pattern: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        PathRegex(pattern)


def test_the_patterns_of_an_adapter_are_compiled_once() -> None:
    patterns = PathPatterns()
    assert patterns.add("a.b") is patterns.add("a.b")
    assert patterns.match("a.b", "a.b.c") and not patterns.fullmatch("a.b", "a.b.c")


def test_the_patterns_of_an_adapter_are_limited_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of these is permitted alone; a thousand of them would take gigabytes and hours."""
    patterns = PathPatterns()
    with pytest.raises(ValueError, match="more than 262144 characters together"):
        deque(map(patterns.add, (f"(?:a?b|c){{5500}}{number}" for number in range(100))), 0)

    monkeypatch.setattr(path_regex, "_TOTAL_TIMEOUT_S", 0.2)
    patterns = PathPatterns()
    slow = [f"(a|aa)+b{number}$" for number in range(5000)]
    with pytest.raises(TimeoutError, match=r"its patterns take longer than 0\.2 s together"):
        deque((patterns.match(one, "a" * 20) for one in slow), 0)

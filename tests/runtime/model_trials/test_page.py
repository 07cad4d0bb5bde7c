"""The page of model classes: its form, and that its lines are what the installed versions give."""

import importlib.metadata

import pytest
from corun.runtime.errors import ConfigError
from corun.runtime.model_trials.outcome import Parity, Trial, page_with, row_of, trials_of, versions_of
from corun.runtime.model_trials.processes import try_in_processes
from support.product import ROOT

PAGE = (ROOT / "docs/models.md").read_text(encoding="utf-8")
BEGIN = "<!-- models: written by `corun models --update FILE` -->"
END = "<!-- end of models -->"
SERVED = Trial("one", "OneForCausalLM", (Parity.EXACT,) * 3 + (Parity.REFUSED,), "a | b")
POPULAR = """
    llama qwen3 gemma3 gpt_oss qwen3_moe qwen2_5_vl llama4 gemma4_unified qwen2_5_omni_thinker
""".split()
# Of text and images; tests/parity has classes of text.
OFTEN = ["qwen2_5_vl"]


def test_the_table_is_between_the_marks_and_sorted() -> None:
    other = Trial("a_type", "AModel").ended(Parity.NOT_BUILT, "it needs images")
    page = page_with(f"before\n{BEGIN}\nold\n{END}\nafter\n", [SERVED, other], "x 1")
    lines = page.splitlines()
    assert lines[:3] == ["before", BEGIN, "With x 1: 1 exact, 1 not built."]
    assert lines[-4:] == [row_of(other), row_of(SERVED), END, "after"]
    assert trials_of(page) == {"a_type": other, "one": SERVED}
    assert versions_of(page) == "x 1" and versions_of("text") is None
    assert row_of(SERVED).endswith("| exact | exact | exact | refused | a \\| b |")


def test_a_page_without_marks_is_refused() -> None:
    with pytest.raises(ConfigError, match="no place for the table"):
        page_with("text", [SERVED], "x 1")


def test_nothing_is_served_wrongly() -> None:
    trials = trials_of(PAGE)
    assert trials.keys() > set(POPULAR)
    bad = [trial for trial in trials.values() if trial.has_failed]
    assert not bad


def check(model_types: list[str]) -> None:
    known = trials_of(PAGE)
    found = {trial.model_type: trial for trial in try_in_processes(model_types)}
    assert found == {name: known.get(name) for name in model_types}


@pytest.fixture
def versions() -> None:
    """Skip where other versions are installed than the page is for."""
    known = versions_of(PAGE)
    assert known is not None
    for item in known.split(", "):
        name, version = item.split()
        if name in ("transformers", "peft") and importlib.metadata.version(name) != version:
            pytest.skip(f"the page is for {item}: corun models --update docs/models.md")


@pytest.mark.usefixtures("versions")
def test_some_classes_are_as_the_page_says() -> None:
    check(OFTEN)


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.usefixtures("versions")
def test_all_classes_are_as_the_page_says() -> None:
    from corun.runtime.model_trials.tiny_config import model_classes

    assert trials_of(PAGE).keys() == model_classes().keys()
    check(sorted(model_classes().keys() - set(OFTEN)))

"""The option table of the README is the one that the options give."""

from pathlib import Path

import pytest
from corun.runtime.cli.options import BEGIN, END, options_markdown, update_table
from corun.runtime.config.engine import EngineConfig
from corun.runtime.config.option import option_specs
from corun.runtime.config.serve import ServeConfig
from corun.runtime.errors import ConfigError


def test_readme_is_up_to_date(repository: Path) -> None:
    document = (repository / "README.md").read_text(encoding="utf-8")
    assert update_table(document) == document, "run: corun options --update README.md"


def test_every_option_has_a_line_and_a_sentence() -> None:
    table = options_markdown()
    for spec in option_specs(EngineConfig) + option_specs(ServeConfig):
        assert f"`{spec.flag}" in table
        assert spec.help.endswith(".")


def test_update_replaces_only_the_table() -> None:
    document = f"before\n{BEGIN}\nold\n{END}\nafter\n"
    updated = update_table(document)
    assert updated == f"before\n{BEGIN}\n{options_markdown()}{END}\nafter\n"
    assert update_table(updated) == updated


def test_update_needs_its_marks() -> None:
    with pytest.raises(ConfigError, match="missing"):
        update_table("no marks")

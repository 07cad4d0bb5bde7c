"""The tables of the pages of options, of clusters and of routes are those that the code gives."""

from pathlib import Path

import pytest
from corun.runtime.cli.options import options_markdown, update_tables
from corun.runtime.config.engine import EngineConfig
from corun.runtime.config.option import option_specs
from corun.runtime.config.serve import ServeConfig
from corun.runtime.errors import ConfigError
from corun.runtime.server.reference import TABLES

BEGIN = "<!-- options: written by `corun options --update FILE` -->"
END = "<!-- end of options -->"
PAGES = {
    "docs/options.md": {"options"},
    "docs/troubleshooting.md": {"exit_codes"},
    "runtime/cluster/README.md": {"cluster"},
    "runtime/server/README.md": set(TABLES),
}


@pytest.mark.parametrize("name", PAGES)
def test_pages_are_up_to_date(repository: Path, name: str) -> None:
    document = (repository / name).read_text(encoding="utf-8")
    assert update_tables(document) == document, f"run: corun options --update {name}"
    for table in PAGES[name]:
        assert f"<!-- {table}: written by `corun options --update {name}` -->" in document


def test_every_option_has_a_line_and_a_sentence() -> None:
    table = options_markdown()
    for spec in option_specs(EngineConfig) + option_specs(ServeConfig):
        assert f"`{spec.flag}" in table
        assert spec.help.endswith(".")


def test_every_limit_of_requests_is_on_the_page() -> None:
    of_http = [
        spec.flag
        for spec in option_specs(ServeConfig)
        if spec.name.startswith("max_") or spec.name.endswith("timeout_s")
    ]
    of_engine = (
        "--max-model-len",
        "--max-num-waiting",
        "--max-queue-s",
        "--max-stop-strings",
        "--max-logit-bias",
    )
    rows = TABLES["limits"]().splitlines()
    for flag in {*of_http, *of_engine} - {"--drain-timeout-s"}:
        assert [row for row in rows if row.endswith(f"| `{flag}` |")], flag
    assert [row for row in rows if "| no limit | `--max-queue-s` |" in row]


def test_update_replaces_only_the_table() -> None:
    document = f"before\n{BEGIN}\nold\n{END}\nafter\n"
    updated = update_tables(document)
    assert updated == f"before\n{BEGIN}\n{options_markdown()}{END}\nafter\n"
    assert update_tables(updated) == updated


def test_update_needs_its_marks() -> None:
    with pytest.raises(ConfigError, match="missing"):
        update_tables("no marks")
    with pytest.raises(ConfigError, match="no table 'other'; known: options, cluster, routes"):
        update_tables(f"{BEGIN}\n{END}\n".replace("options:", "other:").replace("of options", "of other"))

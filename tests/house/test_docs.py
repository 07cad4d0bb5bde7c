"""README, ``docs/`` and CONTRIBUTING: size, links, and the names that they use."""

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from corun.runtime import exit_codes
from corun.runtime.config.cluster import ClusterConfig
from corun.runtime.config.engine import EngineConfig
from corun.runtime.config.option import option_specs
from corun.runtime.config.serve import ServeConfig
from corun.runtime.config.simulate import SimulateConfig
from corun.runtime.scheduler.events import TimePart
from support.product import FOLDERS, ROOT, name_of
from support.tables import TABLES

_MAX_README_BYTES = 12_000
_DOCS = sorted((ROOT / "docs").rglob("*.md"))
_PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *_DOCS]
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_NAMED_FILE = re.compile(r"`([\w./-]*\w\.(?:py|md))`")
_FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")
# Of commands other than serve, and of other programs that a page names.
_OTHER_FLAGS = """
    --budget-s --config --help --help-all --level --model --output --text --update --url
""".split()
# Pages that name other programs' options.
_OF_OTHERS = {"coming-from-vllm.md", "coming-from-llama-cpp.md", "upgrading.md"}


def test_readme_is_short() -> None:
    size = (ROOT / "README.md").stat().st_size
    assert size <= _MAX_README_BYTES, f"README.md has {size} bytes; the manual is docs/"


@pytest.mark.parametrize("page", _PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    wrong = []
    for target in _LINK.findall(page.read_text(encoding="utf-8")):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        if not file.exists() or (anchor and anchor not in _anchors(file)):
            wrong.append(target)
    assert not wrong


@cache
def _anchors(file: Path) -> frozenset[str]:
    """As GitHub makes them of headlines."""
    text = re.sub(r"^```.*?^```", "", file.read_text(encoding="utf-8"), flags=re.M | re.S)
    headings = re.findall(r"^#+ +(.+)$", text, re.MULTILINE)
    return frozenset(re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings)


@pytest.mark.parametrize("page", _PAGES, ids=name_of)
def test_named_files_exist(page: Path) -> None:
    """Paths may be cut at the front."""
    files = _files()
    named = _NAMED_FILE.findall(page.read_text(encoding="utf-8"))
    assert not [name for name in named if not any(file.endswith(f"/{name}") for file in files)]


@cache
def _files() -> tuple[str, ...]:
    found = [*ROOT.glob("*.*")]
    for folder in (*FOLDERS, "bench", "docs", "tests"):
        found += (ROOT / folder).rglob("*.*")
    return tuple(f"/{name_of(path)}" for path in found)


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    pages = [*_DOCS, *(ROOT / "docs" / "examples").glob("*.py")]
    names = [path.relative_to(ROOT / "docs").as_posix() for path in pages]
    assert not [name for name in names if name != "README.md" and f"]({name})" not in index]


@pytest.mark.parametrize(
    "page", [page for page in _PAGES if page.name not in {"CONTRIBUTING.md", *_OF_OTHERS}], ids=name_of
)
def test_named_options_exist(page: Path) -> None:
    named = set(_FLAG.findall(page.read_text(encoding="utf-8")))
    assert named <= {*_flags(), *_OTHER_FLAGS}


@pytest.mark.parametrize("name", ["coming-from-vllm.md", "coming-from-llama-cpp.md"])
def test_what_other_options_are_called_here_exists(name: str) -> None:
    """In the second column of the table of options, and in the third."""
    wrong = [
        flag
        for row in _rows((ROOT / "docs" / name).read_text(encoding="utf-8"), "Options")
        for flag in _FLAG.findall(" ".join(row[1:]))
        if flag not in _flags()
    ]
    assert not wrong


@cache
def _flags() -> frozenset[str]:
    configs = (EngineConfig, ServeConfig, ClusterConfig, SimulateConfig)
    return frozenset(spec.flag for config in configs for spec in option_specs(config))


def _rows(text: str, headline: str) -> Iterator[list[str]]:
    """The tables' rows of one section of a page, without their heads."""
    section = re.split(r"^## ", text, flags=re.MULTILINE)
    (found,) = (part for part in section if part.startswith(f"{headline}\n"))
    lines = [line for line in found.splitlines() if line.startswith("|")]
    for line in lines[2:]:
        yield [cell.strip() for cell in line.strip("|").split(" | ")]


def test_every_error_code_has_advice() -> None:
    text = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    rows = _rows(text, "A request gets an error")
    listed = [code for row in rows for code in re.findall(r"`(\w+)`", row[0])]
    assert sorted(listed) == sorted(re.findall(r"^\| `(\w+)`", TABLES["errors"](), re.MULTILINE))


def test_every_exit_code_is_explained() -> None:
    text = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    listed = [int(row[0]) for row in _rows(text, "Exit codes")]
    assert listed == [code for name, code in vars(exit_codes).items() if name.startswith("EXIT_")]


@pytest.mark.parametrize("name", ["observability.md", "troubleshooting.md"])
def test_every_part_of_a_first_token_is_explained(name: str) -> None:
    text = (ROOT / "docs" / name).read_text(encoding="utf-8")
    assert not [part for part in TimePart if f"`{part}`" not in text]


def test_named_metrics_exist() -> None:
    text = (ROOT / "docs" / "observability.md").read_text(encoding="utf-8")
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "runtime" / "server").glob("*.py"))
    names = [
        name.removesuffix("_total")
        for row in _rows(text, "Metrics")
        for name in re.findall(r"`(\w+)", row[0])
    ]
    assert len(names) > 10
    assert not [name for name in names if f'"{name}"' not in sources]

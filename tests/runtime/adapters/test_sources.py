"""--lora-dir and --lora-modules."""

import os
from pathlib import Path

import pytest
from corun.runtime.adapters.sources import (
    AdapterSource,
    collect_sources,
    discover,
    parse_lora_module,
)
from corun.runtime.errors import ConfigError


def make_adapter(directory: Path) -> Path:
    directory.mkdir(parents=True)
    (directory / "adapter_config.json").write_text("{}")
    return directory


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("a=dir", AdapterSource("a", "dir")),
        ("a=~/dir", AdapterSource("a", os.path.expanduser("~/dir"))),
        ("a=dir=with=equals", AdapterSource("a", "dir=with=equals")),
        ('{"name": "a", "path": "dir"}', AdapterSource("a", "dir")),
        (
            ' {"name": "a", "path": "dir", "base_model_name": "base"}',
            AdapterSource("a", "dir", "base"),
        ),
        ('{"name": "a", "path": "dir", "base_model_name": null}', AdapterSource("a", "dir")),
    ],
)
def test_forms_of_lora_modules(text: str, source: AdapterSource) -> None:
    assert parse_lora_module(text) == source


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a",
        "a=",
        "=dir",
        "{",
        '{"name": "a"}',
        '{"name": "", "path": "dir"}',
        '{"name": 1, "path": "dir"}',
        '{"name": "a", "path": "dir", "rank": 3}',
        '{"name": "a", "path": "dir", "base_model_name": 3}',
    ],
)
def test_wrong_lora_modules_name_the_flag(text: str) -> None:
    with pytest.raises(ConfigError, match="--lora-modules"):
        parse_lora_module(text)


def test_discover_takes_directories_with_a_configuration(tmp_path: Path) -> None:
    make_adapter(tmp_path / "b")
    make_adapter(tmp_path / "a")
    (tmp_path / "not-an-adapter").mkdir()
    (tmp_path / "file").write_text("")
    assert discover(tmp_path) == [("a", tmp_path / "a"), ("b", tmp_path / "b")]


def test_discover_without_directory(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--lora-dir .*No such file"):
        discover(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"--lora-dir .*Not a directory"):
        discover(tmp_path / "file")


def test_collect_joins_both(tmp_path: Path) -> None:
    make_adapter(tmp_path / "a")
    sources = collect_sources(str(tmp_path), ["b=elsewhere"], ["base"])
    assert [source.name for source in sources] == ["a", "b"]
    assert collect_sources(None, [], ["base"]) == ()


@pytest.mark.parametrize(
    ("modules", "needle"),
    [
        (["a=one", "a=two"], "given twice: one and two"),
        (["base=dir"], "is the name of the base model"),
        (["a/b=dir"], "slash"),
        (['{"name": "a", "path": "p", "base_model_name": "other"}'], "'other', but base is served"),
    ],
)
def test_collect_refuses(modules: list[str], needle: str) -> None:
    with pytest.raises(ConfigError, match=needle) as caught:
        collect_sources(None, modules, ["base"])
    assert "--lora-modules" in str(caught.value)


def test_collect_refuses_bad_directory_names(tmp_path: Path) -> None:
    make_adapter(tmp_path / "a:b")
    with pytest.raises(ConfigError, match=r"--lora-dir: .*'a:b'.*colon"):
        collect_sources(str(tmp_path), [])

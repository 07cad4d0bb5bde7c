"""--lora-dir and --lora-modules."""

from pathlib import Path

import pytest
from corun.runtime.adapters.sources import collect_sources, discover, stored_bytes
from corun.runtime.config.notations import LoraModule
from corun.runtime.errors import ConfigError


def make_adapter(directory: Path) -> Path:
    directory.mkdir(parents=True)
    (directory / "adapter_config.json").write_text("{}")
    return directory


def test_discover_takes_directories_with_a_configuration(tmp_path: Path) -> None:
    make_adapter(tmp_path / "b")
    make_adapter(tmp_path / "a")
    (tmp_path / "not-an-adapter").mkdir()
    (tmp_path / "file").write_text("")
    assert discover(tmp_path) == [("a", tmp_path / "a"), ("b", tmp_path / "b")]


def test_directories_within_directories_have_slashes_in_their_names(tmp_path: Path) -> None:
    make_adapter(tmp_path / "team" / "sql")
    make_adapter(tmp_path / "team" / "sql" / "inner")  # part of an adapter, no other
    make_adapter(tmp_path / "team" / ".cache" / "part")
    make_adapter(tmp_path / "1" / "2" / "3" / "4")
    make_adapter(tmp_path / "1" / "2" / "3" / "5" / "too-deep")
    (tmp_path / "loop").symlink_to(tmp_path)
    (tmp_path / "link").symlink_to(tmp_path / "team" / "sql")
    assert [name for name, _ in discover(tmp_path)] == ["1/2/3/4", "link", "team/sql"]


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
        (["a=one", "a=two"], "names 'a' twice: one and two"),
        (["base=dir"], "is the name of the base model"),
        (["a//b=dir"], "slashes"),
        (["../b=dir"], "slashes"),
        (["a\\b=dir"], "backslash"),
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


def test_the_size_of_an_adapters_weights_is_their_files(tmp_path: Path) -> None:
    assert stored_bytes(LoraModule("a", str(tmp_path / "nowhere"))) == 0
    (tmp_path / "adapter_model.safetensors").write_bytes(bytes(100))
    assert stored_bytes(LoraModule("a", str(tmp_path))) == 100

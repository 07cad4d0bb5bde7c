"""--lora-dir and --lora-modules."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from corun.runtime.adapters.sources import (
    LoraDirEntries,
    collect_sources,
    discover,
    log_entries,
    stored_bytes,
)
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
    entries = discover(tmp_path)
    assert [*entries.adapters.items()] == [("a", tmp_path / "a"), ("b", tmp_path / "b")]
    assert not (entries.unreadable or entries.unservable or entries.is_missing)


def test_directories_within_directories_have_slashes_in_their_names(tmp_path: Path) -> None:
    make_adapter(tmp_path / "team" / "sql")
    make_adapter(tmp_path / "team" / "sql" / "inner")  # part of an adapter, no other
    make_adapter(tmp_path / "team" / ".cache" / "part")
    make_adapter(tmp_path / "1" / "2" / "3" / "4")
    make_adapter(tmp_path / "1" / "2" / "3" / "5" / "too-deep")
    (tmp_path / "loop").symlink_to(tmp_path)
    (tmp_path / "link").symlink_to(tmp_path / "team" / "sql")
    assert [*discover(tmp_path).adapters] == ["1/2/3/4", "link", "team/sql"]


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("code", [errno.EACCES, errno.EIO, errno.ESTALE, errno.ENOTCONN])
@pytest.mark.parametrize("what", ["its listing", "its configuration"])
def test_what_cannot_be_read_concerns_itself_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, depth: int, code: int, what: str
) -> None:
    parents = ["team", "part", "more"][:depth]
    names = ["/".join([*parents[:level], f"beside{level}"]) for level in range(depth + 1)]
    for name in names:
        make_adapter(tmp_path / name)
    bad = tmp_path.joinpath(*parents, "lost+found")
    make_adapter(bad / "inner") if what == "its listing" else make_adapter(bad)
    fail(monkeypatch, bad if what == "its listing" else bad / "adapter_config.json", code)
    entries = discover(tmp_path)
    assert set(entries.adapters) == set(names)
    assert entries.unreadable == {"/".join([*parents, "lost+found"]): os.strerror(code)}


def fail(monkeypatch: pytest.MonkeyPatch, bad: Path, code: int) -> None:
    """Let the system refuse access to one path, as for a user without capabilities."""

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        def checked(path: Any, *args: Any, **kwargs: Any) -> Any:
            if not isinstance(path, int) and Path(path) == bad:
                raise OSError(code, os.strerror(code), str(path))
            return function(path, *args, **kwargs)

        return checked

    for name in ("stat", "scandir"):
        monkeypatch.setattr(os, name, wrap(getattr(os, name)))


def test_a_listing_that_breaks_off_does_not_say_what_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_adapter(tmp_path / "a")
    fail(monkeypatch, tmp_path, errno.ESTALE)
    entries = discover(tmp_path)
    assert not entries.adapters and not entries.is_missing
    assert entries.unreadable == {"": "Stale file handle"}
    with pytest.raises(ConfigError, match=r"--lora-dir .*: Stale file handle"):
        collect_sources(str(tmp_path), [])


def test_what_is_gone_in_between_is_not_unreadable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_adapter(tmp_path / "a")
    (tmp_path / "b").mkdir()
    fail(monkeypatch, tmp_path / "b", errno.ENOENT)
    assert [*discover(tmp_path).adapters] == ["a"]
    assert not discover(tmp_path).unreadable


def test_without_a_directory(tmp_path: Path) -> None:
    assert discover(tmp_path / "nowhere").is_missing
    with pytest.raises(ConfigError, match=r"--lora-dir .*No such file"):
        collect_sources(str(tmp_path / "nowhere"), [])
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"--lora-dir .*Not a directory"):
        collect_sources(str(tmp_path / "file"), [])


def test_start_warns_of_what_it_passes_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("a", "b", "2026-11-25T16:45:00", "base", "lost+found"):
        make_adapter(tmp_path / name)
    fail(monkeypatch, tmp_path / "lost+found" / "adapter_config.json", errno.EACCES)
    sources = collect_sources(str(tmp_path), ["b=elsewhere"], ["base"])
    assert [(one.name, one.path) for one in sources] == [("a", str(tmp_path / "a")), ("b", "elsewhere")]
    unreadable, colon, base, twice = sorted(caplog.messages, key=lambda one: "skipped" in one)
    assert "'lost+found' cannot be read (Permission denied)" in unreadable
    assert "2026-11-25T16:45:00" in colon and "a backslash or a colon" in colon
    assert "is the name of the base model" in base
    assert f"skipped {tmp_path / 'b'}: " in twice


def test_what_can_be_read_again_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    good, bad = LoraDirEntries(), LoraDirEntries(unreadable={f"x{i}": "EIO" for i in range(7)})
    for before, now in ((good, bad), (bad, bad), (bad, good), (good, good)):
        log_entries(tmp_path, before, now)
    first, second = caplog.messages
    assert "'x0', 'x1', 'x2', 'x3', 'x4' and 2 more cannot be read (EIO)" in first
    assert "is readable again" in second


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


def test_the_size_of_an_adapters_weights_is_their_files(tmp_path: Path) -> None:
    assert stored_bytes(LoraModule("a", str(tmp_path / "nowhere"))) == 0
    (tmp_path / "adapter_model.safetensors").write_bytes(bytes(100))
    assert stored_bytes(LoraModule("a", str(tmp_path))) == 100

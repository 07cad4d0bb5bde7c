"""Only files in allowed directories, after following links, can be loaded over the network."""

import asyncio
import os
import threading
from pathlib import Path

import pytest
from corun.runtime import file_calls
from corun.runtime.adapters.allowed_dirs import allowed_path, resolve_allowed
from corun.runtime.errors import AdapterUnavailableError, RequestError


@pytest.fixture
def allowed(tmp_path: Path) -> Path:
    """A directory with one adapter, beside one that is not allowed."""
    for name in ("allowed/good", "allowed-not/other"):
        directory = tmp_path / name
        directory.mkdir(parents=True)
        (directory / "adapter_config.json").write_text("{}")
    return tmp_path / "allowed"


def refusal(path: str, allowed: Path) -> str:
    with pytest.raises(RequestError) as caught:
        resolve_allowed(path, [str(allowed)])
    assert caught.value.param == "lora_path"
    return str(caught.value)


def test_path_comes_back_without_links(allowed: Path) -> None:
    (allowed / "link").symlink_to("good")
    for path in (allowed / "good", allowed / "link", allowed / "link" / ".." / "good"):
        assert resolve_allowed(str(path), [str(allowed)]) == str((allowed / "good").resolve())


def test_any_of_the_directories_will_do_and_may_itself_be_a_link(allowed: Path, tmp_path: Path) -> None:
    (tmp_path / "store").symlink_to(allowed)
    roots = [str(tmp_path / "none"), str(tmp_path / "store")]
    assert resolve_allowed(str(tmp_path / "store" / "good"), roots) == str(allowed / "good")
    assert resolve_allowed(str(allowed / "good"), ["/"]) == str(allowed / "good")


def test_outside_and_not_there_get_one_answer(allowed: Path, tmp_path: Path) -> None:
    (allowed / "out").symlink_to(tmp_path / "allowed-not" / "other")
    (allowed / "loop").symlink_to("loop")
    stolen = allowed / "stolen"
    stolen.mkdir()
    (stolen / "adapter_model.safetensors").symlink_to("/etc/passwd")
    paths = [
        "/etc",
        "/no/such/directory",
        "",
        "\0",
        "a" * 5000,
        str(allowed / "missing"),
        str(allowed / ".." / "allowed-not" / "other"),
        str(allowed / "out"),
        str(allowed / "loop"),
        str(stolen),
        str(allowed / "good" / "adapter_config.json"),
    ]
    assert len({refusal(path, allowed) for path in paths}) == 1


def test_a_path_that_does_not_answer_holds_up_no_event_loop(
    allowed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_calls, "_SLICE_S", 0.01)
    monkeypatch.setattr(file_calls.FILES, "timeout_s", 0.5)
    dead, answers, real = str(allowed / "dead"), threading.Event(), os.path.realpath

    def stuck(path: str, *, strict: bool = False) -> str:
        if path.startswith(dead):
            assert answers.wait(20.0)
        return real(path, strict=strict)

    monkeypatch.setattr(os.path, "realpath", stuck)

    async def run() -> None:
        waiting = [
            asyncio.ensure_future(allowed_path(f"{dead}/{number}", [str(allowed)])) for number in range(8)
        ]
        assert await allowed_path(str(allowed / "good"), [str(allowed)]) == str(allowed / "good")
        assert await allowed_path(dead, []) == dead
        for one in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(one, AdapterUnavailableError)
            assert "lora_path cannot be read: the file system does not answer" in str(one)

    asyncio.run(run())
    answers.set()

"""Only files in allowed directories, after following links, can be loaded over the network."""

from pathlib import Path

import pytest
from corun.runtime.adapters.allowed_dirs import resolve_allowed
from corun.runtime.errors import RequestError


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


def test_any_of_the_directories_will_do_and_may_itself_be_a_link(
    allowed: Path, tmp_path: Path
) -> None:
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
        "/etc", "/no/such/directory", "", "\0", "a" * 5000, str(allowed / "missing"),
        str(allowed / ".." / "allowed-not" / "other"), str(allowed / "out"), str(allowed / "loop"),
        str(stolen), str(allowed / "good" / "adapter_config.json"),
    ]  # fmt: skip
    assert len({refusal(path, allowed) for path in paths}) == 1

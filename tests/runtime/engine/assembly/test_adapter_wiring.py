"""An adapter's weights and conventions are read together; weights only if they may differ."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from corun.runtime import file_calls
from corun.runtime.adapter import AdapterFacts
from corun.runtime.adapters.content import AdapterContent
from corun.runtime.adapters.convention_files import ConventionReader
from corun.runtime.adapters.conventions import NO_CONVENTIONS
from corun.runtime.adapters.folder_files import AdapterRoots
from corun.runtime.adapters.registry import AdapterVersion
from corun.runtime.adapters.vocabulary import BaseTokens
from corun.runtime.config.engine import EngineConfig
from corun.runtime.engine.assembly.adapter_wiring import HostFiles, adapter_roots
from corun.runtime.errors import AdapterError
from corun.runtime.file_calls import Place, SilentError
from corun.runtime.plan import AdapterId

TOKENS = BaseTokens({"a": 0, "b": 1}, frozenset(), None, 2)
FILES = ("adapter_config.json", "adapter_model.safetensors")


class Host:
    """Registers any folder and counts that."""

    def __init__(self) -> None:
        self.num_read = 0
        self.removed: list[str] = []
        self.while_reading: Callable[[], object] = lambda: None

    def register(self, path: str, make_room: Any) -> SimpleNamespace:
        self.num_read += 1
        self.while_reading()
        return SimpleNamespace(
            digest="d",
            rank=8,
            num_bytes=9,
            rank_sums=(),
            group_bytes=(),
            group_of_layer=(),
            not_by_workers="",
            host_bytes=(),
            run_pages=(),
            left_out=(),
            is_kept=True,
            vocab_size=None,
        )

    def begin(self, path: str) -> SimpleNamespace:
        return self.register(path, None)

    def remove_content(self, digest: str) -> None:
        self.removed.append(digest)


@pytest.fixture
def host() -> Host:
    return Host()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in FILES:
        (tmp_path / name).write_text("x")
    (tmp_path / "chat_template.jinja").write_text("one")
    return tmp_path


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> None:
    """All files were written a while ago."""
    now_ns = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: now_ns() + 2_000_000_000)


def read(host: Host, folder: Path, known: AdapterContent | None = None) -> AdapterContent:
    version = None
    if known is not None:
        stamps = known.weights_stamps
        version = AdapterVersion(AdapterId(1), "a", str(folder), known.facts, NO_CONVENTIONS, stamps)
    files = HostFiles(host, ConventionReader(TOKENS))  # type: ignore[arg-type]
    return files.read(str(folder), lambda _: None, version)


@pytest.mark.usefixtures("later")
def test_a_new_template_reads_no_weights(host: Host, folder: Path) -> None:
    first = read(host, folder)
    assert (first.conventions.template, first.is_kept, host.num_read) == ("one", True, 1)
    (folder / "chat_template.jinja").write_text("two")
    second = read(host, folder, first)
    assert (second.conventions.template, second.is_kept, host.num_read) == ("two", False, 1)
    assert (second.facts, second.weights_stamps) == (first.facts, first.weights_stamps)


@pytest.mark.usefixtures("later")
@pytest.mark.parametrize("name", FILES)
def test_weights_that_were_written_are_read(host: Host, folder: Path, name: str) -> None:
    first = read(host, folder)
    status = (folder / name).stat()
    (folder / name).write_text("y")
    os.utime(folder / name, ns=(status.st_atime_ns, status.st_mtime_ns))  # as cp -p does
    read(host, folder, first)
    assert host.num_read == 2


def test_weights_that_were_written_just_now_are_read_again(host: Host, folder: Path) -> None:
    first = read(host, folder)
    assert first.weights_stamps is None
    read(host, folder, first)
    assert host.num_read == 2


def test_a_folder_that_changes_while_it_is_read_is_refused(host: Host, folder: Path) -> None:
    host.while_reading = lambda: (folder / "chat_template.jinja").write_text("two")
    with pytest.raises(AdapterError, match="changed while they were read"):
        read(host, folder)
    host.while_reading = (folder / "chat_template.jinja").unlink
    with pytest.raises(AdapterError, match="changed while they were read"):
        read(host, folder)
    assert host.removed == []


def test_a_folder_that_changes_while_it_is_begun_leaves_nothing(host: Host, folder: Path) -> None:
    files = HostFiles(host, ConventionReader(TOKENS))  # type: ignore[arg-type]
    host.while_reading = (folder / "chat_template.jinja").unlink
    with pytest.raises(AdapterError, match="changed while they were read"):
        files.begin(str(folder))
    assert host.removed == ["d"]


def test_conventions_can_be_left(host: Host, folder: Path) -> None:
    files = HostFiles(host, None)  # type: ignore[arg-type]
    content = files.read(str(folder), lambda _: None, None)
    assert content.conventions == NO_CONVENTIONS
    assert content.facts == AdapterFacts("d", 8, 9, layers=content.facts.layers)


def test_links_lead_where_the_options_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = EngineConfig(
        lora_dir="loras",
        lora_resolver=("hub:acme", f"directory:{tmp_path}/more"),
        allowed_lora_dirs=("a", "/b"),
    )
    assert adapter_roots(config) == AdapterRoots(
        str(tmp_path / "loras"), (str(tmp_path / "a"), "/b"), (str(tmp_path / "more"),)
    )


def test_a_template_elsewhere_refuses_conversations(host: Host, folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    (folder / "chat_template.jinja").symlink_to("/etc/passwd")
    content = read(host, folder)
    assert content.conventions.template is None
    assert "it is a link to a file outside of" in str(content.conventions.refusal)


def test_a_file_system_that_does_not_answer_refuses_the_read_and_no_conversation(
    host: Host, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = iter(range(10))

    def silent(function: Callable[[Place], object], path: str, timeout_s: float = 1) -> object:
        if next(calls) == 1:
            raise SilentError(path, timeout_s)
        return function(Place(path))

    monkeypatch.setattr(file_calls.FILES, "call", silent)
    with pytest.raises(AdapterError, match="the file system does not answer"):
        read(host, folder)

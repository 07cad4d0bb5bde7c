"""Stored facts of a base model equal those of its modules, and are dropped when these change."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from corun.gpu.model import skeleton
from corun.gpu.model.source import ModelSource
from corun.runtime.engine.assembly.adapter_check import KnownBase, known_base
from corun.runtime.errors import ModelError
from support.architectures import ARCHITECTURES


@pytest.fixture
def source(tmp_path: Path) -> ModelSource:
    directory = tmp_path / "model"
    ARCHITECTURES["llama3-rope"].config().save_pretrained(directory)
    return ModelSource(str(directory))


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The paths of models with modules that were built."""
    paths: list[str] = []
    build = skeleton.build_skeleton

    def counted(source: ModelSource, *rest: Any) -> Any:
        paths.append(source.path)
        return build(source, *rest)

    monkeypatch.setattr(skeleton, "build_skeleton", counted)
    return paths


def as_read(known: KnownBase) -> Any:
    return msgspec.json.decode(msgspec.json.encode(known))


@pytest.mark.parametrize("name", ["llama3-rope", "mixtral", "gemma2"])
def test_what_is_kept_is_what_was_found(tmp_path: Path, name: str, built: list[str]) -> None:
    ARCHITECTURES[name].config().save_pretrained(tmp_path / name)
    source = ModelSource(str(tmp_path / name))
    found, kept = (known_base(source, "auto", tmp_path / "kept") for _ in range(2))
    assert len(built) == 1
    assert as_read(kept) == as_read(found)
    assert kept.target_map.targets == found.target_map.targets
    assert kept.target_map.vocabularies == found.target_map.vocabularies
    assert kept.served == found.served


def test_another_type_or_place_is_another_question(
    source: ModelSource, tmp_path: Path, built: list[str]
) -> None:
    kept = tmp_path / "kept"
    assert known_base(source, "auto", kept).dtype == "float32"
    assert known_base(source, "bfloat16", kept).dtype == "bfloat16"
    moved = Path(source.path).rename(tmp_path / "moved")
    assert str(moved) in known_base(ModelSource(str(moved)), "auto", kept).served.names
    assert len(built) == 3


def test_a_changed_configuration_counts(source: ModelSource, tmp_path: Path, built: list[str]) -> None:
    kept, path = tmp_path / "kept", Path(source.path) / "config.json"
    layers = {target.layer for target in known_base(source, "auto", kept).target_map.targets}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_hidden_layers": 3}))
    known = known_base(source, "auto", kept)
    assert {target.layer for target in known.target_map.targets} == layers | {2}
    assert len(built) == 2


def test_changed_code_of_the_model_counts(source: ModelSource, tmp_path: Path, built: list[str]) -> None:
    kept = tmp_path / "kept"
    names = [Path(path).name for path in known_base(source, "auto", kept).code]
    assert {"modeling_llama.py", "configuration_llama.py", "targets.py"} <= set(names)
    (record,) = kept.iterdir()
    said = json.loads(record.read_text())
    said["code"] = dict.fromkeys(said["code"], "another")
    record.write_text(json.dumps(said))
    known_base(source, "auto", kept)
    assert len(built) == 2


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff", b'{"target_map": 1}'])
def test_a_damaged_record_is_made_again(
    source: ModelSource, tmp_path: Path, built: list[str], content: bytes
) -> None:
    kept = tmp_path / "kept"
    found = known_base(source, "auto", kept)
    (record,) = kept.iterdir()
    record.write_bytes(content)
    assert as_read(known_base(source, "auto", kept)) == as_read(found)
    assert len(built) == 2 and record.read_bytes() != content


def test_models_with_code_of_their_own_are_not_kept(
    source: ModelSource, tmp_path: Path, built: list[str]
) -> None:
    trusted = ModelSource(source.path, trust_remote_code=True)
    for _ in range(2):
        known_base(trusted, "auto", tmp_path / "kept")
    assert len(built) == 2 and not (tmp_path / "kept").exists()


def test_what_a_start_refuses_is_refused_each_time(source: ModelSource, tmp_path: Path) -> None:
    known_base(source, "auto", tmp_path / "kept")
    (Path(source.path) / "weights.gguf").touch()
    for _ in range(2):
        with pytest.raises(ModelError, match="GGUF"):
            known_base(source, "auto", tmp_path / "kept")


def test_an_adapter_beside_the_base_is_told_each_time(
    source: ModelSource, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (Path(source.path) / "adapter_config.json").write_text("{}")
    for number in (1, 2):
        known_base(source, "auto", tmp_path / "kept")
        assert caplog.text.count("also holds an adapter") == number

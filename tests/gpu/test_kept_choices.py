"""Small files that starts store for later ones."""

from pathlib import Path

import pytest
from corun.gpu import kept_choices
from corun.gpu.kept_choices import choice_path


def test_a_choice_is_of_its_facts_and_its_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = choice_path(tmp_path, "linear", 2)
    assert path == choice_path(tmp_path, "linear", 2)
    assert path != choice_path(tmp_path, "linear", 4)
    monkeypatch.setattr(kept_choices, "read_cpu_model", lambda: "another")
    assert path != choice_path(tmp_path, "linear", 2)


def test_without_a_folder_nothing_is_kept() -> None:
    assert choice_path(None, "linear") is None


@pytest.mark.parametrize("changed", ["has_matrix_registers", "sources_digest"])
def test_other_kernels_are_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: str
) -> None:
    path = choice_path(tmp_path, "linear", 2)
    monkeypatch.setattr(kept_choices, changed, lambda *_: "another")
    assert path != choice_path(tmp_path, "linear", 2)

"""The picture of a profile."""

import sys
from pathlib import Path

import pytest
from corun.profiles.picture import draw_profile
from corun.profiles.profile import ProfileError
from support.profiles import PROFILE


def test_a_png_is_drawn_without_a_display(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "matplotlib.pyplot", raising=False)  # of other tests
    path = tmp_path / "made with it" / "profile.png"
    draw_profile(PROFILE, path)
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert "matplotlib.pyplot" not in sys.modules  # it has state of the whole process


def test_without_matplotlib_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ProfileError, match=r"pip install 'corun\[profile\]'"):
        draw_profile(PROFILE, tmp_path / "profile.png")
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ProfileError, match="cannot be written"):
        draw_profile(PROFILE, tmp_path / "file" / "profile.png")

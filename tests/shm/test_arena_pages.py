"""Huge pages: the kernel's setting, and that requests do not change accounting."""

import os
from pathlib import Path

import pytest
from corun.shm.arena import ArenaPages, huge_page_setting
from corun.shm.errors import SpaceError
from corun.shm.huge_pages import HUGE_PAGE_BYTES
from corun.shm.segment import Segment

SETTINGS = "always within_size advise never deny force"


@pytest.mark.parametrize("chosen", SETTINGS.split())
def test_the_setting(tmp_path: Path, chosen: str) -> None:
    path = tmp_path / "shmem_enabled"
    path.write_text(SETTINGS.replace(chosen, f"[{chosen}]") + "\n")
    assert huge_page_setting(path) == chosen
    assert huge_page_setting(tmp_path / "missing") == "never"


@pytest.mark.parametrize("setting", ["advise", "never", None])
def test_ranges_are_taken_and_given_back_with_or_without_huge_pages(setting: str | None) -> None:
    with Segment.create(8 * HUGE_PAGE_BYTES, kind="adapters", is_sparse=True) as segment:
        pages = ArenaPages(segment, is_elastic=True, setting=setting)
        offset, num_bytes = 4096, 3 * HUGE_PAGE_BYTES + 8192
        before = held_bytes(segment)
        pages.take(offset, num_bytes)
        assert held_bytes(segment) == before + num_bytes
        segment.view("u1", offset, num_bytes)[:] = 7
        pages.give_back(offset, num_bytes)
        assert held_bytes(segment) == before
        pages.take(offset, num_bytes)
        assert not segment.view("u1", offset, num_bytes).any()


def test_the_whole_is_taken_at_once() -> None:
    with Segment.create(2 * HUGE_PAGE_BYTES, kind="adapters", is_sparse=True) as segment:
        pages = ArenaPages(segment, is_elastic=False, setting="advise")
        assert held_bytes(segment) >= 2 * HUGE_PAGE_BYTES
        pages.give_back(0, HUGE_PAGE_BYTES)
        assert held_bytes(segment) >= 2 * HUGE_PAGE_BYTES


def test_memory_that_a_range_has_just_taken_need_not_be_free_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with Segment.create(8 * HUGE_PAGE_BYTES, kind="adapters", is_sparse=True) as segment:
        pages = ArenaPages(segment, is_elastic=True, setting="advise")
        limit = held_bytes(segment) + 5 * HUGE_PAGE_BYTES
        for module in ("arena", "backing"):
            available = f"corun.shm.{module}.available_memory_bytes"
            monkeypatch.setattr(available, lambda: limit - held_bytes(segment))
        pages.take(4096, 4 * HUGE_PAGE_BYTES)
        assert held_bytes(segment) == limit - HUGE_PAGE_BYTES
        with pytest.raises(SpaceError):
            pages.take(5 * HUGE_PAGE_BYTES, 2 * HUGE_PAGE_BYTES)


def held_bytes(segment: Segment) -> int:
    return os.fstat(segment.fd).st_blocks * 512

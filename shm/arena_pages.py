"""Huge pages for a segment that holds matrices, and the memory of parts of a sparse one.

A product over matrices in pages of 4 KiB spends part of its time on address translation, so the
kernel is asked for huge pages before the first touch, where it gives any to shared memory.
"""

import logging
from pathlib import Path

from .backing import available_memory_bytes
from .huge_pages import HUGE_PAGE_BYTES, MADV_HUGEPAGE, MADV_NOHUGEPAGE, MADV_POPULATE_WRITE, advise
from .segment import Segment

_LOG = logging.getLogger(__name__)

_SETTING = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
_GIVEN = ("always", "within_size", "advise")  # settings under which advice, or nothing, is needed


def huge_page_setting(path: Path = _SETTING) -> str:
    """What the kernel does about huge pages in shared memory; "never" where it has none."""
    try:
        words = path.read_text(encoding="ascii").split()
    except OSError:
        return "never"
    chosen = [word[1:-1] for word in words if word.startswith("[")]
    return chosen[0] if chosen else "never"


class ArenaPages:
    """Takes and returns the memory of ranges of a sparse segment.

    An elastic one holds memory only for what is taken. Huge pages are then asked for inside a
    range: one that reached beyond it would hold memory that nobody accounts for. One that is not
    elastic takes all memory at once, and ``take`` and ``give_back`` do nothing.
    """

    def __init__(self, segment: Segment, *, is_elastic: bool, setting: str | None = None) -> None:
        """``setting`` stands for the kernel's; None = read it. Raises ``SpaceError``."""
        assert segment.is_sparse, "its memory was taken before huge pages could be asked for"
        self._segment = segment
        self._is_elastic = is_elastic
        setting = huge_page_setting() if setting is None else setting
        self._wants_huge = setting in _GIVEN
        _LOG.debug(
            "huge pages in shared memory: %s; %s", setting,
            "asked for" if self._wants_huge else "not asked for",
        )  # fmt: skip
        if not is_elastic:
            self._take(0, segment.num_bytes)
        elif self._wants_huge:
            self._advise(0, segment.num_bytes, MADV_NOHUGEPAGE)

    def take(self, offset: int, num_bytes: int) -> None:
        """Have memory for a range; its contents are kept. Raises ``SpaceError``."""
        if self._is_elastic:
            self._take(offset, num_bytes)

    def give_back(self, offset: int, num_bytes: int) -> None:
        """Return the memory of a range that was taken."""
        if not self._is_elastic:
            return
        start, end = self._huge_interior(offset, num_bytes)
        if self._wants_huge and end > start:
            self._advise(start, end - start, MADV_NOHUGEPAGE)
        self._segment.give_back(offset, num_bytes)

    def _take(self, offset: int, num_bytes: int) -> None:
        start, end = self._huge_interior(offset, num_bytes)
        # Only a touch makes huge pages, allocation does not. It is not tried on a machine that has
        # too little memory, for which somebody would be killed: ``allocate`` says so instead.
        if self._wants_huge and end > start and num_bytes <= available_memory_bytes():
            self._advise(start, end - start, MADV_HUGEPAGE)
            self._advise(start, end - start, MADV_POPULATE_WRITE)
        self._segment.allocate(offset, num_bytes)

    def _huge_interior(self, offset: int, num_bytes: int) -> tuple[int, int]:
        """The whole huge pages inside a range, as offsets; aligned by address."""
        base = self._segment.address
        start = -(-(base + offset) // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES - base
        end = (base + offset + num_bytes) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES - base
        return start, end

    def _advise(self, offset: int, num_bytes: int, advice: int) -> None:
        # A segment's payload begins with a page.
        advise(self._segment.address + offset, num_bytes, advice)

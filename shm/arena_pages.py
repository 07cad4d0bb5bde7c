"""Huge pages for a segment that holds matrices, and the memory of parts of a sparse one.

With pages of 4 KiB a product over matrices spends part of its time on address translation, so huge
pages are requested before the first touch, if the kernel offers them for shared memory.
"""

import logging
from pathlib import Path

from .backing import available_memory_bytes
from .huge_pages import HUGE_PAGE_BYTES, MADV_HUGEPAGE, MADV_NOHUGEPAGE, MADV_POPULATE_WRITE, advise
from .segment import Segment

_LOG = logging.getLogger(__name__)

_SETTING = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
_GIVEN = (
    "always",
    "within_size",
    "advise",
)  # settings that give huge pages


def huge_page_setting(path: Path = _SETTING) -> str:
    """The kernel's setting for huge pages in shared memory; "never" if it does not support them."""
    try:
        words = path.read_text(encoding="ascii").split()
    except OSError:
        return "never"
    chosen = [word[1:-1] for word in words if word.startswith("[")]
    return chosen[0] if chosen else "never"


class ArenaPages:
    """Allocates and returns the memory of ranges of a sparse segment.

    An elastic segment has memory only for allocated ranges. Huge pages are then requested inside
    a range, because one that reached beyond it would hold memory that is not accounted for. A
    segment that is not elastic allocates all memory at once; ``take`` and ``give_back`` do nothing.
    """

    def __init__(self, segment: Segment, *, is_elastic: bool, setting: str | None = None) -> None:
        """``setting`` overrides the kernel's; None = read it. Raises ``SpaceError``."""
        assert segment.is_sparse, "its memory was allocated before requesting huge pages"
        self._segment = segment
        self._is_elastic = is_elastic
        setting = huge_page_setting() if setting is None else setting
        self._wants_huge = setting in _GIVEN
        _LOG.debug(
            "huge pages in shared memory: %s; %s", setting,
            "requested" if self._wants_huge else "not requested",
        )  # fmt: skip
        if not is_elastic:
            self._take(0, segment.num_bytes)
        elif self._wants_huge:
            self._advise(0, segment.num_bytes, MADV_NOHUGEPAGE)

    def take(self, offset: int, num_bytes: int) -> None:
        """Allocate memory for a range; its contents are kept. Raises ``SpaceError``."""
        if self._is_elastic:
            self._take(offset, num_bytes)

    def give_back(self, offset: int, num_bytes: int) -> None:
        """Return the memory of an allocated range."""
        if not self._is_elastic:
            return
        start, end = self._huge_interior(offset, num_bytes)
        if self._wants_huge and end > start:
            self._advise(start, end - start, MADV_NOHUGEPAGE)
        self._segment.give_back(offset, num_bytes)

    def _take(self, offset: int, num_bytes: int) -> None:
        start, end = self._huge_interior(offset, num_bytes)
        # Only a touch makes huge pages, allocation does not. It is not tried on a machine with too
        # little memory, where a process would be killed for it: ``allocate`` raises an error.
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
        # A segment's payload starts with a page.
        advise(self._segment.address + offset, num_bytes, advice)

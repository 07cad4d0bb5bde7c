"""What reading an adapter's folder brings: all that makes a version. Plain data."""

from dataclasses import dataclass

from ..adapter import AdapterFacts
from .conventions import NO_CONVENTIONS, AdapterConventions

FileStamp = tuple[int, int, int, int, int]  # device, inode, bytes, mtime and ctime in ns


@dataclass(frozen=True, slots=True)
class AdapterContent:
    """Read at one time: neither part has changed while the other was read.

    Without ``is_read`` the values have not been read: the first load reads and checks them, and the
    digest of the facts stands for that of the content.
    """

    facts: AdapterFacts
    conventions: AdapterConventions = NO_CONVENTIONS
    # Of configuration and weights; None = they may change without leaving a trace there.
    weights_stamps: tuple[FileStamp, ...] | None = None
    is_kept: bool = False  # on the host, where room was made
    is_read: bool = True

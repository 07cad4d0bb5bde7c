"""Available memory, of the machine or of the control group that is nearest to its limit."""

from pathlib import Path

from .cgroup import cgroup_memory_rooms
from .facts import parse_meminfo


def read_memory_room(root: Path = Path("/")) -> tuple[int, int]:
    """(available bytes, all bytes) where the available share is smallest.

    Reclaimable page cache counts as available. Raises ``OSError`` or ``KeyError`` if the system
    does not report it.
    """
    meminfo = parse_meminfo((root / "proc/meminfo").read_text(encoding="ascii"))
    rooms = [(meminfo["MemAvailable"], meminfo["MemTotal"]), *cgroup_memory_rooms(root)]
    return min(rooms, key=lambda room: room[0] / room[1] if room[1] else 1.0)

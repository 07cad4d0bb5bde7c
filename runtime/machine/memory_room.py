"""What is available of memory: the machine's, or a control group's that is nearer to its limit."""

from pathlib import Path

from .cgroup import cgroup_memory_rooms
from .facts import parse_meminfo


def read_memory_room(root: Path = Path("/")) -> tuple[int, int]:
    """(available bytes, all bytes) where the share that is available is smallest.

    Page cache that can go counts as available. Raises ``OSError`` or ``KeyError`` if the system
    does not tell.
    """
    meminfo = parse_meminfo((root / "proc/meminfo").read_text(encoding="ascii"))
    rooms = [(meminfo["MemAvailable"], meminfo["MemTotal"]), *cgroup_memory_rooms(root)]
    return min(rooms, key=lambda room: room[0] / room[1] if room[1] else 1.0)

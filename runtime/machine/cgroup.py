"""Reads the limits that control groups put on this process: memory and CPU quota.

Versions 1 and 2, nested groups, and containers that see only a part of the tree. Every function
takes ``root``, the directory that stands for ``/``; nothing is kept between calls.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_UNLIMITED_BYTES = 2**60  # version 1 writes "no limit" as a number near 2**63


@dataclass(frozen=True, slots=True)
class CgroupMemory:
    """The tightest limit of the groups around this process."""

    limit_bytes: int | None  # None = no limit
    available_bytes: int | None  # under the limits; reclaimable page cache counts as free


@dataclass(frozen=True, slots=True)
class _Hierarchy:
    """One mounted control-group tree and this process's group in it."""

    version: int
    controllers: tuple[str, ...]  # of version 1
    mount_point: Path
    group: Path  # at or below the mount point

    def levels(self) -> Iterator[Path]:
        """Yield the process's group and those around it, up to the mount point."""
        group = self.group
        while True:
            yield group
            if group == self.mount_point:
                return
            group = group.parent


def cgroup_memory(root: Path) -> CgroupMemory:
    """Return the memory limit and the memory available under it."""
    rooms = cgroup_memory_rooms(root)
    available = min((room for room, _ in rooms), default=None)
    return CgroupMemory(min((limit for _, limit in rooms), default=None), available)


def cgroup_memory_rooms(root: Path) -> list[tuple[int, int]]:
    """Return (available, limit) bytes of each group with a limit around this process."""
    rooms: list[tuple[int, int]] = []
    for hierarchy in _hierarchies(root):
        if hierarchy.version == 1 and "memory" not in hierarchy.controllers:
            continue
        read_level = _memory_level_v2 if hierarchy.version == 2 else _memory_level_v1
        for group in hierarchy.levels():
            limit, used = read_level(group)
            if limit is not None:
                rooms.append((max(0, limit - used), limit))
    return rooms


def cgroup_cpu_quota(root: Path) -> float | None:
    """Return the CPU quota of this process, in CPUs, or None without one."""
    quotas = []
    for hierarchy in _hierarchies(root):
        if hierarchy.version == 1 and "cpu" not in hierarchy.controllers:
            continue
        read_level = _cpu_level_v2 if hierarchy.version == 2 else _cpu_level_v1
        quotas += [read_level(group) for group in hierarchy.levels()]
    return min((quota for quota in quotas if quota is not None), default=None)


def cgroup_throttled_s(root: Path) -> float:
    """Return the seconds for which CPU quotas have throttled this process's groups.

    The sum since the groups were made, over all CPUs with a runnable thread.
    """
    throttled_s = 0.0
    for hierarchy in _hierarchies(root):
        for group in hierarchy.levels():
            if hierarchy.version == 2 and _cpu_level_v2(group) is not None:
                throttled_s += _read_stat(group / "cpu.stat", "throttled_usec") * 1e-6
            elif hierarchy.version == 1 and "cpu" in hierarchy.controllers:
                throttled_s += _read_stat(group / "cpu.stat", "throttled_time") * 1e-9
    return throttled_s


def _memory_level_v2(group: Path) -> tuple[int | None, int]:
    limits = [_read_number(group / name) for name in ("memory.max", "memory.high")]
    limit = min((value for value in limits if value is not None), default=None)
    used = _read_number(group / "memory.current") or 0
    return limit, used - _read_stat(group / "memory.stat", "inactive_file")


def _memory_level_v1(group: Path) -> tuple[int | None, int]:
    limit = _read_number(group / "memory.limit_in_bytes")
    if limit is not None and limit >= _UNLIMITED_BYTES:
        limit = None
    used = _read_number(group / "memory.usage_in_bytes") or 0
    return limit, used - _read_stat(group / "memory.stat", "total_inactive_file")


def _cpu_level_v2(group: Path) -> float | None:
    words = _read_text(group / "cpu.max").split()
    if len(words) != 2 or words[0] == "max":
        return None
    return int(words[0]) / int(words[1])


def _cpu_level_v1(group: Path) -> float | None:
    quota_us = _read_number(group / "cpu.cfs_quota_us")
    period_us = _read_number(group / "cpu.cfs_period_us")
    if quota_us is None or quota_us <= 0 or not period_us:
        return None
    return quota_us / period_us


def _hierarchies(root: Path) -> Iterator[_Hierarchy]:
    """Yield the control-group trees that this process sees and belongs to."""
    groups = _own_groups(_read_text(root / "proc/self/cgroup"))
    for line in _read_text(root / "proc/self/mountinfo").splitlines():
        left, _, right = line.partition(" - ")
        fields, kind = left.split(), right.split()
        if len(fields) < 5 or len(kind) < 3 or kind[0] not in ("cgroup", "cgroup2"):
            continue
        version = 2 if kind[0] == "cgroup2" else 1
        options = () if version == 2 else tuple(kind[2].split(","))
        own = [path for names, path in groups if _belongs(names, options, version)]
        if own:
            mount_point = root / fields[4].lstrip("/")
            group = _locate(mount_point, mounted=fields[3], own=own[0])
            yield _Hierarchy(version, options, mount_point, group)


def _own_groups(text: str) -> list[tuple[tuple[str, ...], str]]:
    """Parse /proc/self/cgroup into (controllers, path); version 2 has no controllers."""
    entries = []
    for line in text.splitlines():
        number, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        if number and path:
            entries.append((tuple(name for name in names.split(",") if name), path))
    return entries


def _belongs(names: tuple[str, ...], options: tuple[str, ...], version: int) -> bool:
    return not names if version == 2 else bool(names) and set(names) <= set(options)


def _locate(mount_point: Path, *, mounted: str, own: str) -> Path:
    """Return the directory of the process's group, or the nearest one above that is visible.

    ``mounted`` is the part of the tree that is mounted: in a container often the group itself.
    """
    mounted_parts, own_parts = Path(mounted).parts, Path(own).parts
    if own_parts[: len(mounted_parts)] == mounted_parts:
        own_parts = own_parts[len(mounted_parts) :]
    else:
        own_parts = own_parts[1:]
    if ".." in own_parts:
        return mount_point
    group = mount_point.joinpath(*own_parts)
    while not group.is_dir() and group != mount_point:
        group = group.parent
    return group


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""  # not mounted, not readable or not this version: no limit is known


def _read_number(path: Path) -> int | None:
    text = _read_text(path).strip()
    try:
        return int(text)
    except ValueError:
        return None  # missing, or the word "max"


def _read_stat(path: Path, name: str) -> int:
    for line in _read_text(path).splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return 0

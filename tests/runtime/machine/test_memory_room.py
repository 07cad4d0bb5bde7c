"""What is available of memory, of the machine or of the group that is nearest to its limit."""

from pathlib import Path

from corun.runtime.machine.facts import read_memory_room

_KIB = 1024


def tree(root: Path, *, available_kib: int, groups: dict[str, tuple[int, int, int]]) -> Path:
    """A machine of 1000 KiB; ``groups``: path -> limit, used and page cache that can go."""
    (root / "proc/self").mkdir(parents=True)
    meminfo = f"MemTotal: 1000 kB\nMemAvailable: {available_kib} kB\n"
    (root / "proc/meminfo").write_text(meminfo)
    mount = root / "sys/fs/cgroup"
    mount.mkdir(parents=True)
    deepest = max(groups, key=len, default="/")
    (root / "proc/self/cgroup").write_text(f"0::{deepest}\n")
    (root / "proc/self/mountinfo").write_text("30 1 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n")
    for path, (limit, used, cached) in groups.items():
        directory = mount / path.strip("/")
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "memory.max").write_text(str(limit * _KIB))
        (directory / "memory.current").write_text(str(used * _KIB))
        (directory / "memory.stat").write_text(f"inactive_file {cached * _KIB}\n")
    return root


def test_the_machine_alone(tmp_path: Path) -> None:
    root = tree(tmp_path, available_kib=300, groups={})
    assert read_memory_room(root) == (300 * _KIB, 1000 * _KIB)


def test_the_group_that_is_nearest_to_its_limit(tmp_path: Path) -> None:
    groups = {"/outer": (400, 395, 10), "/outer/inner": (200, 150, 0)}
    root = tree(tmp_path, available_kib=300, groups=groups)
    assert read_memory_room(root) == (15 * _KIB, 400 * _KIB)


def test_the_machine_is_nearer_to_its_end_than_a_group(tmp_path: Path) -> None:
    root = tree(tmp_path, available_kib=50, groups={"/one": (400, 100, 0)})
    assert read_memory_room(root) == (50 * _KIB, 1000 * _KIB)


def test_this_machine() -> None:
    available_bytes, total_bytes = read_memory_room()
    assert 0 < available_bytes <= total_bytes

"""What a start or a large body has needed is given back."""

import linecache
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from corun.runtime.machine.unused_memory import Mapping, give_back_unused, is_unchanged_library, read_mappings

_SMAPS = """\
7f00-9f00 r-xp 00001000 fe:00 77   /lib/libtorch_cpu.so
Size:                  8 kB
Rss:                   6 kB
Anonymous:             0 kB
VmFlags: rd ex mr mw me
aa000-ab000 rw-p 00000000 00:00 0
Rss:                   4 kB
Anonymous:             4 kB
"""

_LARGE_BODIES = """
import threading
from pathlib import Path
from corun.runtime.machine.unused_memory import return_large_blocks

def resident_kib():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:"))

def read_body():
    for _ in range(3):
        body = b"a" * (24 << 20)
        text, items = body.decode(), [b"b" * 1024 for _ in range(4096)]

return_large_blocks()
before_kib = resident_kib()
read_body()
thread = threading.Thread(target=read_body)
thread.start()
thread.join()
print(resident_kib() - before_kib)
"""


def test_mappings_are_read(tmp_path: Path) -> None:
    (tmp_path / "smaps").write_text(_SMAPS)
    assert list(read_mappings(tmp_path / "smaps")) == [
        Mapping(0x7F00, 0x2000, "r-xp", "/lib/libtorch_cpu.so", 6144, 0),
        Mapping(0xAA000, 0x1000, "rw-p", "", 4096, 4096),
    ]
    assert list(read_mappings(tmp_path / "nowhere")) == []


@pytest.mark.parametrize(
    ("permissions", "path", "own_bytes", "expected"),
    [
        ("r-xp", "/lib/libgomp.so.1.0.0", 0, True),
        ("r--p", "/lib/_umath.cpython-311-x86_64-linux-gnu.so", 0, True),
        ("r--p", "/lib/libtorch.so", 4096, False),  # relocated
        ("rw-p", "/lib/libtorch.so", 0, False),
        ("r--s", "/lib/libtorch.so", 0, False),
        ("r--p", "/models/model.safetensors", 0, False),
        ("r--p", "/models/my.so/model.safetensors", 0, False),
        ("r-xp", "", 0, False),  # compiled kernels
    ],
)
def test_what_may_go(permissions: str, path: str, own_bytes: int, expected: bool) -> None:
    assert is_unchanged_library(Mapping(0, 8192, permissions, path, 8192, own_bytes)) == expected


def test_code_of_libraries_goes_and_comes_back() -> None:
    matrix = np.random.default_rng(0).normal(size=(200, 200))
    before = matrix @ matrix
    linecache.getlines(__file__)
    resident_bytes = _resident_code_bytes()
    give_back_unused()
    assert _resident_code_bytes() < 0.7 * resident_bytes
    assert __file__ not in linecache.cache
    np.testing.assert_array_equal(matrix @ matrix, before)


def test_what_large_bodies_have_taken_is_given_back() -> None:
    command = [sys.executable, "-c", _LARGE_BODIES]
    result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert int(result.stdout) < 16 << 10  # KiB; otherwise glibc keeps 96 MiB


def _resident_code_bytes() -> int:
    return sum(one.resident_bytes for one in read_mappings() if is_unchanged_library(one))

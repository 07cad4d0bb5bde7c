"""Register tiles of dense products: what LLVM makes of them."""

import os
import subprocess
import sys

import pytest
from corun.cpu_workers.kernels.simd import isa


@pytest.mark.parametrize("level", ["avx2", "avx512"])
def test_no_sum_of_a_tile_is_kept_in_memory(level: str) -> None:
    """A vector that leaves its register in a loop makes a tile two or three times slower."""
    if level not in [each.name for each in isa.machine_levels()]:
        pytest.skip(f"this machine has no {level}")
    inherited = {key: value for key, value in os.environ.items() if "NUMBA_" not in key}
    done = subprocess.run(
        [sys.executable, "-c", _COUNT_SPILLS],
        env=inherited | isa.forcing_environment(level), capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.strip() == "[]"


_COUNT_SPILLS = """
import re
import numpy as np
from numba import int64, boolean, njit
from corun.cpu_workers.kernels.linear.tiles import wide_product

@njit(error_model="numpy")
def product(a, b, c, d, e, f, g, h, i, j, k):
    wide_product(a, b, c, d, e, f, g, h, i, j, k)

product.compile((*[int64] * 10, boolean))
(assembly,) = product.inspect_asm().values()
# Vectors that are written to the stack between two products: in a tile's loop.
lines = [line.strip() for line in assembly.splitlines()]
spills = []
for index, line in enumerate(lines):
    around = lines[max(0, index - 8) : index] , lines[index + 1 : index + 9]
    is_within = all(any(near.startswith("vfmadd") for near in side) for side in around)
    if is_within and re.match(r"vmov\\w+\\s+%[yz]mm\\d+, -?\\d*\\(%r[sb]p\\)", line):
        spills.append(line)
print(spills)
"""

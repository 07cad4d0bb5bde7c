"""Register tiles of dense products: the code that LLVM generates."""

import json
import os
import platform
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
        env=inherited | isa.forcing_environment(level),
        capture_output=True,
        text=True,
        check=True,
    )
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


_WITH_DOT = {
    "int8": "vpdpwssd",
    "uint8": "vpdpbusd",
    "uint32": "vpdpbusd",
    "uint64": "vpdpwssd",
    "float64": "vpdpbusd",
    "boolean": "vpdpwssd",
}
_WITHOUT_DOT = {
    "int8": "vpmaddwd",
    "uint8": "vpmaddubsw",
    "uint64": "vpmaddwd",
    "float64": "vpmaddubsw",
    "boolean": "vpmaddwd",
}


# Each kind once, on both levels some with bytes, with halves and with levels; all pairs in full runs.
_SOME = {
    ("avx2", None): ("int8", "uint8", "boolean"),
    ("avx512", "avx512vnni"): ("uint32", "uint64", "float64"),
}
_ALL = {
    ("avx2", None): _WITHOUT_DOT,
    ("avx2", "avxvnni"): _WITH_DOT,
    ("avx512", None): _WITHOUT_DOT,
    ("avx512", "avx512vnni"): _WITH_DOT,
}


@pytest.mark.skipif(platform.machine() != "x86_64", reason="names instructions of x86")
@pytest.mark.parametrize(
    ("level", "feature", "kinds"),
    [
        *((*machine, kinds) for machine, kinds in _SOME.items()),
        *(pytest.param(*machine, tuple(kinds), marks=pytest.mark.full) for machine, kinds in _ALL.items()),
    ],
)
def test_tiles_of_integers_are_made_of_products_and_keep_their_sums(
    level: str, feature: str | None, kinds: tuple[str, ...]
) -> None:
    """Compiled here on every machine; the tests of products run them where supported."""
    inherited = {key: value for key, value in os.environ.items() if "NUMBA_" not in key}
    environment = inherited | isa.forcing_environment(level)
    if feature is not None:
        environment["NUMBA_CPU_FEATURES"] += f",+{feature}"
    register = "zmm" if level == "avx512" else "ymm"
    done = subprocess.run(
        [sys.executable, "-c", _INNER_LOOPS, register, *kinds],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    loops = json.loads(done.stdout)
    for kind in kinds:
        instruction = _ALL[level, feature][kind]
        assert len(loops[kind]) >= 7, loops[kind]  # one for each shape, and more in halves
        for found in loops[kind]:
            assert found["products"] == [instruction], (kind, found)
            assert found["on_stack"] == 0, found


_INNER_LOOPS = r"""
import json, re, sys
from numba import boolean, int64, njit, types
from corun.cpu_workers.kernels.linear.quantized_tiles import quantized_product

register, *kinds = sys.argv[1:]

@njit(error_model="numpy")
def product(t, a, b, c, d, e, f, g, h, i, j, k, l):
    quantized_product(t, a, b, c, d, e, f, g, h, i, j, k, l)

found = {}
for name in kinds:
    kind = getattr(types, name)
    product.compile((kind, *[int64] * 10, boolean, int64))
    assembly = product.inspect_asm()[(kind, *[int64] * 10, boolean, int64)]
    lines = [line.strip().removeprefix("{vex}").strip() for line in assembly.splitlines()]
    labels, loops = {}, []
    for index, line in enumerate(lines):
        if label := re.match(r"(\.LBB\w+):", line):
            labels[label[1]] = index
        jump = re.match(r"j\w+\s+(\.LBB\w+)", line)
        if not jump or jump[1] not in labels:
            continue
        body = lines[labels[jump[1]] + 1 : index]
        if any(each.startswith(".LBB") for each in body):
            continue  # not the innermost
        products = [each for each in body if re.match(r"vpmadd|vpdp", each)]
        if len(products) < 4:
            continue  # of zero points
        assert all(register in each for each in products), products
        stack = re.compile(r"%[xyz]mm\d+.*\(%r[sb]p\)|\(%r[sb]p\).*%[xyz]mm")
        loops.append({
            "products": sorted({each.split()[0] for each in products}),
            "on_stack": sum(bool(stack.search(each)) for each in body),
        })
    found[name] = loops
print(json.dumps(found))
"""

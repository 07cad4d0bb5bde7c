"""Runs a program of this folder that uses Triton in a process of its own.

Triton decides at its import whether it interprets or compiles.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

_TESTS = Path(__file__).parents[2]
# The interpreter of Triton 3.6 makes integers of arrays in a way that numpy 2.4 has removed.
_INTERPRETER_IS_TOO_OLD = "only 0-dimensional arrays can be converted to Python scalars"

# As an engine starts: importing transformers takes 1.8 s of processor time instead of 4.4.
_WITHOUT_COMPILER = """
import runpy, sys
from corun.gpu.without_compiler import without_compiler
del sys.argv[0]
with without_compiler():
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


def cxx_compiler() -> str | None:
    """The C++ compiler of this machine, if there is one."""
    named = os.environ.get("CXX")
    return next(filter(None, map(shutil.which, [named] if named else ["c++", "g++"])), None)


def run_triton_program(module: str, *arguments: str, **variables: str) -> str:
    """Run a module of this folder and return what it prints; skip where the interpreter cannot."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    # Before existing entries, which may name the corun under test.
    path = os.pathsep.join(filter(None, (str(_TESTS), os.environ.get("PYTHONPATH"))))
    environment |= {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", **variables}
    finished = subprocess.run(
        [sys.executable, "-c", _WITHOUT_COMPILER, f"support.triton.{module}", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    if "TRITON_INTERPRET" in variables and _INTERPRETER_IS_TOO_OLD in finished.stderr:
        pytest.skip("this Triton's interpreter does not work with this numpy")
    assert finished.returncode == 0, finished.stderr[-4000:]
    return finished.stdout


def spilled_bytes(binary: bytes) -> int:
    """Bytes of a thread that are in memory because its registers are full; the largest kernel's."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        shown = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    used = re.findall(r"STACK:(\d+) .*LOCAL:(\d+)", shown)
    assert used, shown
    return max(int(stack) + int(local) for stack, local in used)

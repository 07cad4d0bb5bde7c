"""Instruction set levels: detection, forcing, and refusals."""

import json
import os
import subprocess
import sys
from functools import cache
from typing import Any

import pytest
from corun.cpu_workers.kernels.simd import isa

_AVX2 = frozenset(["avx", "avx2", "bmi", "bmi2", "f16c", "fma", "lzcnt", "movbe", "popcnt"])
_AVX512 = _AVX2 | frozenset(["avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"])
# The levels that this machine supports, other than this process's.
_MACHINE = isa.level_of(isa.machine_features())
_OTHERS = [level.name for level in isa.LEVELS[isa.LEVELS.index(_MACHINE) :] if level is not isa.process_isa()]


@pytest.mark.parametrize(
    ("features", "expected"),
    [
        (_AVX512 | {"avx512bf16", "amx-bf16"}, "avx512-bf16"),
        (_AVX512 | {"avx512vnni"}, "avx512"),
        (_AVX512 - {"avx512bw"}, "avx2"),  # the first processors with 512 bits
        (_AVX2, "avx2"),
        (_AVX2 - {"fma"}, "generic"),
        (frozenset({"neon"}), "generic"),
    ],
)
def test_the_highest_level_that_a_processor_has_whole(features: frozenset[str], expected: str) -> None:
    assert isa.level_of(features).name == expected


def test_auto_forces_nothing() -> None:
    assert isa.forcing_environment("auto") == {}
    assert isa.why_not("auto") is None


@cache
def _process(**environment: str) -> dict[str, Any]:
    """What a process of its own finds that it computes with."""
    code = (
        "import json\n"
        "from corun.cpu_workers.kernels.simd import isa\n"
        "reasons = {level.name: isa.why_not(level.name) for level in isa.LEVELS}\n"
        "found = dict(name=isa.process_isa().name, is_forced=isa.is_forced(), why_not=reasons)\n"
        "found |= dict(has_dot=isa.has_integer_dot(), has_tiles=isa.has_matrix_registers())\n"
        "print(json.dumps(found))"
    )
    inherited = {key: value for key, value in os.environ.items() if "NUMBA_" not in key}
    done = subprocess.run(
        [sys.executable, "-c", code], env=inherited | environment, capture_output=True, check=True
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("level", [each.name for each in isa.LEVELS])
def test_a_forced_process_is_of_that_level(level: str) -> None:
    found = _process(**isa.forcing_environment(level))
    reason = found["why_not"][level]
    if isa.level_of(isa.machine_features()).name not in (level, *_above(level)):
        assert "this processor does not support" in reason
    else:
        assert (found["name"], found["is_forced"], reason) == (level, True, None)


def _above(level: str) -> list[str]:
    names = [each.name for each in isa.LEVELS]
    return names[: names.index(level)]


@pytest.mark.skipif(not _OTHERS, reason="this machine has the lowest level")
def test_a_process_of_another_level_is_told_how_to_be_started() -> None:
    reason = isa.why_not(_OTHERS[0])
    assert reason is not None
    assert "own_process=True" in reason
    assert "NUMBA_CPU_FEATURES=" in reason


def test_numbas_own_switches_count() -> None:
    assert _process(NUMBA_ENABLE_AVX="0")["name"] == "generic"
    assert _process(NUMBA_CPU_NAME="generic")["name"] == "generic"


@pytest.mark.parametrize(
    ("level", "more", "expected"),
    [
        ("avx2", "", False),
        ("avx2", ",+avxvnni", True),
        ("avx2", ",+avx512vnni", False),  # of registers that this level has not
        ("avx512", ",+avxvnni", False),
        ("avx512", ",+avx512vnni", True),
        ("generic", ",+avxvnni", False),
    ],
)
def test_products_of_integers_are_added_where_the_level_has_the_instruction(
    level: str, more: str, expected: bool
) -> None:
    environment = isa.forcing_environment(level)
    environment["NUMBA_CPU_FEATURES"] += more
    assert _process(**environment)["has_dot"] is expected


def test_a_forced_level_uses_no_matrix_registers() -> None:
    assert _process(**isa.forcing_environment("avx512-bf16"))["has_tiles"] is False


def test_refused_matrix_registers_are_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An unknown request stands for a system that refuses them."""
    monkeypatch.setattr(isa, "process_features", lambda: frozenset({"amx-tile", "amx-bf16"}))
    monkeypatch.setattr(isa, "_REQUEST_PERMISSION", 0)
    isa.has_matrix_registers.cache_clear()
    try:
        assert not isa.has_matrix_registers()
    finally:
        isa.has_matrix_registers.cache_clear()
    assert "the system refuses the processor's matrix registers (AMX): Invalid argument" in caplog.text

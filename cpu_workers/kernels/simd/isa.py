"""Instruction set levels of the processor, and how one is forced.

A level determines how kernels are written: how many values a vector holds, how many vectors stay in
registers, whether one instruction multiplies pairs of bfloat16. All of a process's kernels have one
level, because numba compiles for one target. ``auto`` is the highest level of the processor. A
lower one is forced by the environment with which a process starts, so that it also limits torch and
oneDNN.

Loads only the standard library; querying the processor imports llvmlite.
"""

import ctypes
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache


@dataclass(frozen=True, slots=True)
class CpuIsa:
    """One level. Features are named as LLVM names them."""

    name: str
    features: frozenset[str]  # required in addition to the next lower level
    lanes: int  # float32 values of a vector register
    has_many_registers: bool  # 32 vectors, else 16
    has_fma: bool
    has_bfloat16_dot: bool
    integer_dot: str | None  # optional instructions of some processors: products of integers, added
    benefit: str  # description for users
    llvm_cpu: str
    environment: Mapping[str, str]  # limits other libraries to the level


_LOG = logging.getLogger(__name__)

_MATRIX_FEATURES = frozenset({"amx-tile", "amx-bf16"})
# Of x86-64 Linux: the system call, its request, and the part of a thread's state that is asked for.
_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18

_AVX2 = frozenset({"avx", "avx2", "bmi", "bmi2", "f16c", "fma", "lzcnt", "movbe", "popcnt"})
_AVX512 = frozenset({"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"})

# From the highest to the lowest; a processor with one has all lower ones.
LEVELS = (
    CpuIsa(
        "avx512-bf16",
        frozenset({"avx512bf16"}),
        16,
        True,
        True,
        True,
        "avx512vnni",
        "products of bfloat16 pairs, two per value of 512-bit vectors",
        "x86-64-v4",
        {
            "ATEN_CPU_CAPABILITY": "avx512",
            "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16",
            "MKL_ENABLE_INSTRUCTIONS": "AVX512",
        },
    ),
    CpuIsa(
        "avx512",
        _AVX512,
        16,
        True,
        True,
        False,
        "avx512vnni",
        "bfloat16 weights, float32 products in 512-bit vectors",
        "x86-64-v4",
        {
            "ATEN_CPU_CAPABILITY": "avx512",
            "ONEDNN_MAX_CPU_ISA": "AVX512_CORE",
            "MKL_ENABLE_INSTRUCTIONS": "AVX512",
        },
    ),
    CpuIsa(
        "avx2",
        _AVX2,
        8,
        False,
        True,
        False,
        "avxvnni",
        "bfloat16 weights, float32 products in 256-bit vectors",
        "x86-64-v3",
        {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
    ),
    CpuIsa(
        "generic",
        frozenset(),
        4,
        False,
        False,
        False,
        None,
        "bfloat16 weights, float32 products in 128-bit vectors",
        "generic",
        {
            "ATEN_CPU_CAPABILITY": "default",
            "ONEDNN_MAX_CPU_ISA": "SSE41",
            "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
        },
    ),
)

AUTO = "auto"
NAMES = (AUTO, *(level.name for level in LEVELS))


def forcing_environment(name: str) -> dict[str, str]:
    """The variables that limit a process to a level, set before it loads any library.

    Empty for ``auto``.
    """
    if name == AUTO:
        return {}
    level = next(level for level in LEVELS if level.name == name)
    features = ",".join(f"+{feature}" for feature in sorted(_needed(level)))
    return {"NUMBA_CPU_NAME": level.llvm_cpu, "NUMBA_CPU_FEATURES": features, **level.environment}


def level_of(features: frozenset[str]) -> CpuIsa:
    """The highest level that needs only these features."""
    return next(level for level in LEVELS if _needed(level) <= features)


@cache
def machine_features() -> frozenset[str]:
    """The features of the processor that the system allows, by LLVM's names."""
    import llvmlite.binding

    features = llvmlite.binding.get_host_cpu_features()
    return frozenset(name for name, is_there in features.items() if is_there)


def machine_levels() -> tuple[CpuIsa, ...]:
    """The levels that this machine has, from the highest to the lowest."""
    return LEVELS[LEVELS.index(level_of(machine_features())) :]


@cache
def process_features() -> frozenset[str]:
    """The features for which numba compiles in this process, by LLVM's names."""
    from numba import config

    if config.CPU_FEATURES is not None:
        asked = config.CPU_FEATURES.split(",")
        return frozenset(name[1:] for name in asked if name.startswith("+"))
    features = machine_features()
    if not config.ENABLE_AVX:
        features = frozenset(name for name in features if not name.startswith("avx"))
    return features


@cache
def process_isa() -> CpuIsa:
    """The level of the kernels of this process, for which numba compiles."""
    return level_of(process_features())


def has_integer_dot() -> bool:
    """Whether an instruction of this process multiplies integers and adds them to a sum.

    Not a level: processors of the same level differ in it. A forced level does not use it.
    """
    return process_isa().integer_dot in process_features()


@cache
def has_matrix_registers() -> bool:
    """Whether this process may multiply bfloat16 in matrix registers (AMX).

    Linux gives them to a process that asks for them. Not a level, like products of integers.
    """
    if not process_features() >= _MATRIX_FEATURES:
        return False
    system_call = ctypes.CDLL(None, use_errno=True).syscall
    if system_call(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) == 0:
        return True
    _LOG.warning(
        "the system refuses the processor's matrix registers (AMX): %s; products use vectors",
        os.strerror(ctypes.get_errno()),
    )
    return False


def is_forced() -> bool:
    """Whether the user has set numba's target."""
    from numba import config

    return config.CPU_FEATURES is not None


def why_not(name: str) -> str | None:
    """Why this process cannot compute at a level; None if it can."""
    if name == AUTO:
        return None
    level = next(level for level in LEVELS if level.name == name)
    missing = _needed(level) - machine_features()
    if missing:
        return (
            f"this processor does not support {', '.join(sorted(missing))}; its highest level "
            f"is {machine_levels()[0].name}"
        )
    if process_isa() is level:
        return None
    variables = " ".join(f"{key}={value}" for key, value in forcing_environment(name).items())
    return (
        f"this process compiles for {process_isa().name}; run the engine in its own process "
        f"(own_process=True), or start this one with {variables}"
    )


def _needed(level: CpuIsa) -> frozenset[str]:
    lower = LEVELS[LEVELS.index(level) :]
    return frozenset().union(*(each.features for each in lower))

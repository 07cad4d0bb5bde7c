"""Reads lists of CPUs such as ``2-7,10``, the values of ``--cpu-cores`` and ``--engine-cores``."""

import re

from ..errors import ConfigError

_PART = re.compile(r"(\d+)(?:-(\d+))?")
_MAX_CPU = 2**16


def parse_cpu_cores(text: str, flag: str) -> tuple[int, ...]:
    """Return the CPUs in the order given. Raises ``ConfigError`` that names ``flag``."""
    cpus: list[int] = []
    for part in text.split(","):
        match = _PART.fullmatch(part.strip())
        if match is None:
            raise ConfigError(
                f"{flag} is {text!r}, must be CPU numbers and ranges, for instance 2-7,10"
            )
        first = int(match[1])
        last = first if match[2] is None else int(match[2])
        if last < first or last > _MAX_CPU:
            raise ConfigError(f"{flag} is {text!r}: {part.strip()} is no range of CPUs")
        cpus.extend(range(first, last + 1))
    double = sorted({cpu for cpu in cpus if cpus.count(cpu) > 1})
    if double:
        raise ConfigError(f"{flag} is {text!r}: CPU {double[0]} is given twice")
    return tuple(cpus)


def format_cpus(cpus: tuple[int, ...]) -> str:
    """Write CPUs the way they are given, sorted: ``(2, 3, 4, 10)`` -> ``2-4,10``."""
    parts: list[list[int]] = []
    for cpu in sorted(cpus):
        if parts and parts[-1][-1] == cpu - 1:
            parts[-1].append(cpu)
        else:
            parts.append([cpu])
    return ",".join(f"{p[0]}-{p[-1]}" if len(p) > 1 else str(p[0]) for p in parts)

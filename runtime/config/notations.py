"""Option values with a notation of their own: lists of CPUs, amounts of memory, adapters.

Every error names the flag or other source of the value.
"""

import json
import os
import re
from dataclasses import dataclass

from ..errors import ConfigError

_CUDA_DEVICE = re.compile(r"cuda:(0|[1-9]\d{0,2})")
_CPU_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_MAX_CPU = 2**16
_AMOUNT = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")
_UNITS = {
    "": 1,
    "B": 1,
    **{f"{letter}B": 10 ** (3 * power) for power, letter in enumerate("KMGT", start=1)},
    **{f"{letter}IB": 2 ** (10 * power) for power, letter in enumerate("KMGT", start=1)},
}


@dataclass(frozen=True, slots=True)
class LoraModule:
    """An adapter to serve: its name in the API and its PEFT directory."""

    name: str
    path: str  # a leading ~ is expanded
    base_model_name: str | None = None  # the intended base model, if it is given


def parse_lora_modules(items: tuple[str, ...], flag: str = "--lora-modules") -> tuple[LoraModule, ...]:
    """Return the adapters that ``items`` name, each as ``name=path`` or as JSON.

    JSON has ``name`` and ``path``, and may have ``base_model_name``.

    Raises ``ConfigError`` for a wrong or repeated one.
    """
    modules = tuple(_parse_module(item, flag) for item in items)
    seen: dict[str, LoraModule] = {}
    for module in modules:
        if module.name in seen:
            raise ConfigError(
                f"{flag} names {module.name!r} twice: {seen[module.name].path} and {module.path}"
            )
        seen[module.name] = module
    return modules


def parse_lora_resolver(text: str, flag: str = "--lora-resolver") -> tuple[str, str | None]:
    """Return the kind ("directory" or "hub"), and the directory or the accepted owner.

    Raises ``ConfigError`` for anything but directory:DIR, hub, hub:OWNER and hub:OWNER/NAME.
    """
    kind, colon, argument = text.partition(":")
    if kind == "directory" and argument.strip():
        return kind, os.path.abspath(os.path.expanduser(argument.strip()))
    if kind == "hub" and bool(colon) == bool(argument.strip()):
        return kind, argument.strip() or None
    raise ConfigError(f"{flag} is {text!r}, expected directory:DIR, hub, hub:OWNER or hub:OWNER/NAME")


def check_lora_resolvers(texts: tuple[str, ...], flag: str) -> None:
    """Raise ``ConfigError`` for the first text that is no resolver."""
    for text in texts:
        parse_lora_resolver(text, flag)


def _parse_module(text: str, flag: str) -> LoraModule:
    parse = _parse_json if text.lstrip().startswith("{") else _parse_pair
    name, path, base_model_name = parse(text, flag)
    if not name.strip() or not path.strip():
        raise ConfigError(f"{flag} {text!r}: name and path must not be empty")
    return LoraModule(name.strip(), os.path.expanduser(path.strip()), base_model_name)


def _parse_pair(text: str, flag: str) -> tuple[str, str, None]:
    name, separator, path = text.partition("=")
    if not separator:
        raise ConfigError(
            f"{flag} {text!r}: must be NAME=PATH or JSON with name and path (MODEL comes before the flag)"
        )
    return name, path, None


def _parse_json(text: str, flag: str) -> tuple[str, str, str | None]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{flag} {text!r}: not valid JSON: {error}") from None
    if not {"name", "path"} <= set(value) <= {"name", "path", "base_model_name"}:
        raise ConfigError(f"{flag} {text!r}: the keys must be name, path and base_model_name")
    name, path, base_model_name = value["name"], value["path"], value.get("base_model_name")
    if not isinstance(name, str) or not isinstance(path, str):
        raise ConfigError(f"{flag} {text!r}: name and path must be text")
    if not isinstance(base_model_name, str | None):
        raise ConfigError(f"{flag} {text!r}: base_model_name must be text")
    return name, path, base_model_name


def check_cpu_cores(text: str, flag: str) -> None:
    """Raise ``ConfigError`` unless ``text`` is auto, none or a list of CPUs."""
    if text not in ("auto", "none"):
        parse_cpu_cores(text, flag)


def check_device(text: str, flag: str) -> None:
    """Raise ``ConfigError`` unless ``text`` is auto, cpu, cuda, or cuda:N for one of several."""
    if text not in ("auto", "cuda", "cpu") and _CUDA_DEVICE.fullmatch(text) is None:
        raise ConfigError(f"{flag} is {text!r}, must be one of auto, cuda, cuda:N, cpu")


def parse_cpu_cores(text: str, flag: str) -> tuple[int, ...]:
    """Return the CPUs of a list such as ``2-7,10`` in the order given.

    Raises ``ConfigError`` that names ``flag``.
    """
    cpus: list[int] = []
    for part in text.split(","):
        match = _CPU_RANGE.fullmatch(part.strip())
        if match is None:
            raise ConfigError(f"{flag} is {text!r}, must be CPU numbers and ranges, for instance 2-7,10")
        first = int(match[1])
        last = first if match[2] is None else int(match[2])
        if last < first or last > _MAX_CPU:
            raise ConfigError(f"{flag} is {text!r}: {part.strip()} is not a range of CPUs")
        cpus.extend(range(first, last + 1))
    double = sorted({cpu for cpu in cpus if cpus.count(cpu) > 1})
    if double:
        raise ConfigError(f"{flag} is {text!r}: CPU {double[0]} is given twice")
    return tuple(cpus)


def format_cpus(cpus: tuple[int, ...]) -> str:
    """Return CPUs as a sorted list with ranges: ``(2, 3, 4, 10)`` -> ``2-4,10``."""
    parts: list[list[int]] = []
    for cpu in sorted(cpus):
        if parts and parts[-1][-1] == cpu - 1:
            parts[-1].append(cpu)
        else:
            parts.append([cpu])
    return ",".join(f"{p[0]}-{p[-1]}" if len(p) > 1 else str(p[0]) for p in parts)


def parse_num_bytes(text: str, flag: str) -> int:
    """Return the bytes of an amount such as ``4GiB``; a number alone counts bytes.

    Raises ``ConfigError`` that names ``flag``.
    """
    match = _AMOUNT.fullmatch(text.strip())
    unit = None if match is None else _UNITS.get(match[2].upper())
    if match is None or unit is None:
        raise ConfigError(f"{flag} is {text!r}, must be a number of bytes, for instance 4GiB or 4294967296")
    num_bytes = float(match[1]) * unit if "." in match[1] else int(match[1]) * unit
    if num_bytes != int(num_bytes):
        raise ConfigError(f"{flag} is {text!r}, which is not a whole number of bytes")
    return int(num_bytes)

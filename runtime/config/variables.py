"""Reads option values from the environment: ``CORUN_`` and the option's name in capitals.

Several values are separated and quoted as on a command line. Options are known only through their
specs.
"""

import logging
import shlex
from collections.abc import Iterable, Mapping
from typing import Any

from ..errors import ConfigError
from ..near_names import near_names
from .option import OptionSpec, check_value, parse_text, replacement

PREFIX = "CORUN_"
_SWITCH = {
    **dict.fromkeys(("1", "true", "yes", "on"), True),
    **dict.fromkeys(("0", "false", "no", "off"), False),
}
# Other variables may share the prefix: Kubernetes sets some for a service named "corun".
_NEAR = 0.8

_logger = logging.getLogger(__name__)


def read_variables(environment: Mapping[str, str], specs: Iterable[OptionSpec]) -> dict[str, Any]:
    """Return {field name: checked value} of the options in ``environment``.

    Raises ``ConfigError`` for a value that is empty, out of range or of the wrong type, and for an
    option that is gone. A variable that is almost named like an option is logged.
    """
    by_variable = {PREFIX + spec.name.upper(): spec for spec in specs}
    values = {}
    for variable, text in environment.items():
        spec = by_variable.get(variable)
        if spec is not None:
            values[spec.name] = check_value(spec, _parsed(spec, text, variable), label=variable)
        elif variable.startswith(PREFIX):
            if (instead := replacement(variable.removeprefix(PREFIX))) is not None:
                raise ConfigError(f"{variable} is gone: give {instead}")
            hint = near_names(variable, by_variable, "{}", show=str, most=1, cutoff=_NEAR)
            if hint:
                _logger.warning("unknown environment variable %s (did you mean %s?)", variable, hint)
    return values


def _parsed(spec: OptionSpec, text: str, variable: str) -> Any:
    if not text.strip():
        raise ConfigError(f"{variable} is empty; unset it, or give it a value")
    if spec.repeated:
        try:
            items = shlex.split(text)
        except ValueError as error:
            raise ConfigError(f"{variable} is {text!r}: {error}") from None
        return tuple(parse_text(spec, item, label=variable) for item in items)
    if spec.kind is not bool:
        return parse_text(spec, text, label=variable)
    switch = _SWITCH.get(text.strip().lower())
    if switch is None:
        raise ConfigError(f"{variable} is {text!r}, must be one of {', '.join(_SWITCH)}")
    return switch

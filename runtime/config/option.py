"""One place where an option is written: a dataclass field with help, choices and unit.

Command-line flags, YAML keys and the option table of the docs are derived from the fields.
"""

from collections.abc import Callable, Sequence
from dataclasses import MISSING, field
from typing import Any


def option(
    default: Any = MISSING,
    *,
    help: str,
    choices: Sequence[str] = (),
    metavar: str | None = None,
    default_factory: Callable[[], Any] | None = None,
) -> Any:
    """Return a dataclass field that carries its own documentation.

    The flag is the field's name with dashes (``max_model_len`` -> ``--max-model-len``), the YAML
    key is the flag without the leading dashes, dashes or underscores alike.
    """
    metadata = {"help": help, "choices": tuple(choices), "metavar": metavar}
    if default_factory is not None:
        return field(default_factory=default_factory, metadata=metadata)
    return field(default=default, metadata=metadata)

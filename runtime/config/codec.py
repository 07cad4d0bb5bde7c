"""Converts a configuration to builtins and back, to send it to another process."""

from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from ..errors import ConfigError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Config = TypeVar("Config", bound="DataclassInstance")


def config_to_dict(config: object) -> dict[str, Any]:
    """Return a dataclass as builtins that JSON and MessagePack can carry."""
    data = msgspec.to_builtins(config)
    assert isinstance(data, dict)
    return data


def config_from_dict(config_class: type[Config], data: dict[str, Any]) -> Config:
    """Return the configuration that ``config_to_dict`` made ``data`` from; checks run again.

    Raises ``ConfigError``.
    """
    unknown = set(data) - set(config_class.__dataclass_fields__)
    if unknown:
        raise ConfigError(f"{config_class.__name__} has no {', '.join(sorted(unknown))}")
    try:
        return msgspec.convert(data, config_class)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{config_class.__name__}: {error}") from None

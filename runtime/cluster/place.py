"""Where a cluster is: its state directory, its key, and the URL of its controller."""

import contextlib
import os
import secrets
from pathlib import Path

import msgspec

from ...profiles.find import state_directory
from ..config.cluster import ClusterConfig
from ..errors import ConfigError, CorunError
from ..whole_file import write_whole

_PLACE_NAME = "cluster.json"
_KEY_NAME = "cluster.key"
_KEY_BYTES = 32


class _Place(msgspec.Struct, frozen=True):
    """What the file of a running cluster says."""

    controller_url: str


def state_dir_of(config: ClusterConfig) -> Path:
    """Return the directory that the options name, or the user's own."""
    if config.state_dir is not None:
        return Path(config.state_dir).expanduser().absolute()
    return state_directory(dict(os.environ), Path.home()).with_name("cluster")


def make_state_dir(config: ClusterConfig) -> tuple[Path, str]:
    """Return the directory and the cluster's key; what is missing is made.

    Raises ``ConfigError`` for a directory that cannot be written, and for a file without a key.
    """
    directory = state_dir_of(config)
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = directory / _KEY_NAME
        if config.cluster_key_file is None and not path.exists():
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with open(descriptor, "w", encoding="ascii") as file:
                file.write(secrets.token_urlsafe(_KEY_BYTES) + "\n")
    except OSError as error:
        raise ConfigError(f"--state-dir {directory}: {error.strerror}") from None
    return directory, read_key(config)


def read_key(config: ClusterConfig) -> str:
    """Return the cluster's key. Raises ``ConfigError`` if there is none."""
    path = Path(config.cluster_key_file or state_dir_of(config) / _KEY_NAME)
    try:
        lines = path.read_text(encoding="ascii").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--cluster-key-file {path} cannot be read: {error}") from None
    keys = [line.strip() for line in lines if line.strip()]
    if len(keys) != 1 or not keys[0].isprintable():
        raise ConfigError(f"--cluster-key-file {path} must hold one key, and holds {len(keys)}")
    return keys[0]


def tell(directory: Path, controller_url: str) -> None:
    """Write down where the controller is, for ``corun cluster status`` and the like."""
    write_whole(directory / _PLACE_NAME, msgspec.json.encode(_Place(controller_url)))


def untell(directory: Path) -> None:
    """There is none any more."""
    with contextlib.suppress(FileNotFoundError):
        (directory / _PLACE_NAME).unlink()


def find_controller(config: ClusterConfig) -> str:
    """Return the controller's URL. Raises ``CorunError`` if no cluster runs there."""
    if config.controller is not None:
        return config.controller.rstrip("/").removesuffix("/v1")
    directory = state_dir_of(config)
    try:
        place = msgspec.json.decode((directory / _PLACE_NAME).read_bytes(), type=_Place)
    except (OSError, msgspec.DecodeError):
        raise CorunError(
            f"no cluster runs with --state-dir {directory}; give its own, or --controller URL"
        ) from None
    return place.controller_url

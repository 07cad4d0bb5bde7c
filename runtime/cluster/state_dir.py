"""A cluster's state directory, its key, and the URL of its controller."""

import contextlib
import os
import secrets
from pathlib import Path

import msgspec

from ...profiles.find import state_directory
from ..config.cluster import ClusterConfig
from ..errors import ConfigError, CorunError
from ..whole_file import sync_directory, write_whole

_CONTROLLER_NAME = "cluster.json"
_KEY_NAME = "cluster.key"
_KEY_BYTES = 32


class _Controller(msgspec.Struct, frozen=True):
    """The content of a running cluster's ``cluster.json``."""

    controller_url: str


def state_dir_of(config: ClusterConfig) -> Path:
    """Return ``--state-dir``, or the user's default directory."""
    if config.state_dir is not None:
        return Path(config.state_dir).expanduser().absolute()
    return state_directory(dict(os.environ), Path.home()).with_name("cluster")


def make_state_dir(config: ClusterConfig) -> tuple[Path, str]:
    """Return the state directory and the cluster's key, and create what is missing.

    Raises ``ConfigError`` if the directory cannot be written or the key file holds no key.
    """
    directory = state_dir_of(config)
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = directory / _KEY_NAME
        if config.cluster_key_file is None:
            _make_key(path)
    except OSError as error:
        raise ConfigError(f"--state-dir {directory}: {error.strerror}") from None
    return directory, read_key(config)


def _make_key(path: Path) -> None:
    """Make a file with a new key, unless there is one."""
    if path.exists():
        if path.stat().st_size:
            return
        path.unlink()  # a power cut has left an empty file
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "w", encoding="ascii") as file:
        file.write(secrets.token_urlsafe(_KEY_BYTES) + "\n")
        file.flush()
        os.fsync(file.fileno())
    sync_directory(path.parent)


def read_key(config: ClusterConfig) -> str:
    """Return the cluster's key. Raises ``ConfigError`` if there is none."""
    path = Path(config.cluster_key_file or state_dir_of(config) / _KEY_NAME)
    try:
        lines = path.read_text(encoding="ascii").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--cluster-key-file {path} cannot be read: {error}") from None
    keys = [line.strip() for line in lines if line.strip()]
    if len(keys) != 1 or not keys[0].isprintable():
        raise ConfigError(f"--cluster-key-file {path} must hold one key, but holds {len(keys)}")
    return keys[0]


def publish_controller(directory: Path, controller_url: str) -> None:
    """Write the controller's URL to a file, where ``corun cluster status`` and others find it."""
    write_whole(directory / _CONTROLLER_NAME, msgspec.json.encode(_Controller(controller_url)))


def remove_controller(directory: Path) -> None:
    """Remove the file with the controller's URL, if there is one."""
    with contextlib.suppress(FileNotFoundError):
        (directory / _CONTROLLER_NAME).unlink()


def find_controller(config: ClusterConfig) -> str:
    """Return the controller's URL. Raises ``CorunError`` if no cluster runs with this directory."""
    if config.controller is not None:
        return config.controller.rstrip("/").removesuffix("/v1")
    directory = state_dir_of(config)
    try:
        controller = msgspec.json.decode((directory / _CONTROLLER_NAME).read_bytes(), type=_Controller)
    except (OSError, msgspec.DecodeError):
        raise CorunError(
            f"no cluster runs with --state-dir {directory}; give the cluster's --state-dir, or "
            "--controller URL"
        ) from None
    return controller.controller_url

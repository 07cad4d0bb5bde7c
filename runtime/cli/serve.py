"""``corun serve``: options in, a running server out."""

import argparse
import contextlib
import os
import re
import sys
from dataclasses import replace
from pathlib import Path

from ..config.demo import with_demo
from ..config.engine import EngineConfig
from ..config.flags import build_configs
from ..config.notations import parse_lora_modules
from ..config.serve import ServeConfig
from ..config.variables import PREFIX
from ..engine.spawn import spawn_engine
from ..errors import ConfigError
from ..server.access import Access, Keys
from .main import configure_logging

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def run(arguments: argparse.Namespace) -> int:
    """Serve until a signal ends it; return the exit code."""
    engine_config, serve_config = serve_configs(arguments)
    configure_logging(serve_config.log_level)
    return _serve(engine_config, serve_config)


def serve_configs(arguments: argparse.Namespace) -> tuple[EngineConfig, ServeConfig]:
    """Return the checked options of a ``corun serve`` command line, the demo filled in.

    Raises ``ConfigError``.
    """
    engine_config, serve_config = build_configs(
        vars(arguments),
        (EngineConfig, ServeConfig),
        environment=os.environ,
        yaml_path=arguments.config or os.environ.get(f"{PREFIX}CONFIG"),
    )
    check_model(engine_config, serve_config)
    check_paths(engine_config, serve_config)
    return with_demo(engine_config), serve_config


def check_model(engine_config: EngineConfig, serve_config: ServeConfig) -> None:
    """Raise ``ConfigError`` if MODEL is a key, or seems to be among the keys.

    A model's name is logged and sent to the hub, a key must not be. So this check comes first, and
    its errors do not show the value. Files of keys, which may be pipes, are read later.
    """
    model = engine_config.model
    keys_of = {"--api-key": serve_config.api_key, "--admin-key": serve_config.admin_key}
    Access(Keys(serve_config.api_key), Keys(serve_config.admin_key)).check_model(model)
    for flag, keys in keys_of.items():
        if model is None and len(keys) > 1 and _seems_a_model(keys[-1]):
            raise ConfigError(
                f"the last of the {len(keys)} values of {flag} looks like MODEL, which must come "
                f"before the flag: corun serve MODEL {flag} KEY ...; if it is a key, write it into "
                f"the file of {flag}-file"
            )


def _seems_a_model(key: str) -> bool:
    return _HUB_ID.fullmatch(key) is not None or os.path.isdir(key)


def check_paths(engine_config: EngineConfig, serve_config: ServeConfig) -> None:
    """Raise ``ConfigError`` if a directory or file that an option names does not exist.

    A directory that does not answer may exist; its adapters are served when it answers.
    """
    if engine_config.lora_dir is not None:
        _check_directory(engine_config.lora_dir, "--lora-dir")
    for module in parse_lora_modules(engine_config.lora_modules):
        _check_directory(module.path, f"--lora-modules {module.name}")
    for directory in serve_config.allowed_lora_dirs:
        _check_directory(directory, "--allowed-lora-dirs")
    profile = engine_config.profile
    if profile is not None and not Path(profile).is_file():
        raise ConfigError(f"--profile {profile}: no such file")
    for flag, template in (
        ("--chat-template", serve_config.chat_template),
        ("--response-template", serve_config.response_template),
    ):
        if template is not None and not Path(template).is_file():
            raise ConfigError(f"{flag} {template}: no such file")


def _serve(engine_config: EngineConfig, serve_config: ServeConfig) -> int:
    access = Access.of(serve_config)
    access.check_model(engine_config.model)
    engine_config = replace(engine_config, allowed_lora_dirs=serve_config.allowed_lora_dirs)
    # The engine takes longest to start, so it loads while the server is imported.
    with contextlib.closing(spawn_engine(serve_config.log_level)) as spawned:
        spawned.configure(engine_config)
        import asyncio

        from ..server.run import serve

        server = serve(engine_config, serve_config, spawned=spawned, access=access)
        if sys.platform == "linux":
            import uvloop

            return uvloop.run(server)
        return asyncio.run(server)


def _check_directory(path: str, flag: str) -> None:
    from ..file_calls import is_directory

    if is_directory(path) is False:
        reason = "not a directory" if Path(path).exists() else "no such directory"
        raise ConfigError(f"{flag} {path}: {reason}")

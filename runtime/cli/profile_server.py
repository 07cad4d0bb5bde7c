"""``corun profile --url``: measures a vLLM server over HTTP."""

import argparse
import asyncio
import os
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from ...profiles.profile import Profile, ProfileError, save_profile
from ...profiles.report import server_lines, warning_lines
from ..config.cluster import check_url
from ..config.engine import EngineConfig
from ..config.flags import build_configs
from ..config.option import option_specs
from ..errors import ConfigError, CorunError, ResourceError
from ..server.errors import HttpError
from .main import in_order
from .profile import ProgressLine

_USED = ("model", "revision", "trust_remote_code", "dtype", "max_num_batched_tokens")
_REQUIRED = ("output", "max_num_batched_tokens", "max_num_seqs")


@in_order()
def run_server(arguments: argparse.Namespace) -> int:
    """Measure, save and print; return the exit code."""
    url = check_url(arguments.url, "--url")
    config = _config(arguments, url)
    output = Path(arguments.output).expanduser()
    if not output.parent.is_dir():
        raise ConfigError(f"--output {output}: there is no directory {output.parent}")
    progress = ProgressLine()
    try:
        profile = asyncio.run(_measure(arguments, url, config, output, progress))
        save_profile(profile, output)
    except HttpError as error:
        raise ConfigError(f"--url {url}: {error}") from error
    except ProfileError as error:
        raise CorunError(str(error)) from error
    except OSError as error:
        raise ResourceError(f"--output or --adapters-dir: {error}") from error
    finally:
        progress.end()
    for line in server_lines(profile):
        print(line)
    for line in warning_lines(profile):
        print(f"corun: warning: {line}", file=sys.stderr)
    print(f"\nprofile  {output}\n\ncorun cluster --engine {url},kind=vllm,profile={output}")
    return 0


async def _measure(
    arguments: argparse.Namespace, url: str, config: EngineConfig, output: Path,
    progress: ProgressLine,
) -> Profile:  # fmt: skip
    from ..cluster.engine_types.vllm import inspect_server
    from ..cluster.http.calls import make_session
    from ..cluster.profiling.run import SERVER_EFFORTS, ServerTask, profile_server
    from ..engine.assembly.base_model import read_base_model

    key = arguments.server_key or ""
    async with make_session(key) as session:
        _, seen = await inspect_server(session, url)  # before torch is loaded
    model = config.model or seen.base
    if config.model is None and not Path(model).is_dir():
        raise ConfigError(
            f"{url} loaded its base model from {model}, which is not on this machine: give MODEL, "
            "its directory or hub id"
        )
    max_num_seqs = config.max_num_seqs
    config = EngineConfig(**{name: getattr(config, name) for name in _USED} | {"model": model})
    with ExitStack() as stack:
        directory = arguments.adapters_dir or stack.enter_context(
            tempfile.TemporaryDirectory(prefix="corun-profile-")
        )
        task = ServerTask(
            url=url,
            key=key,
            base=read_base_model(config),
            base_name=model,
            adapters_dir=Path(directory).expanduser().absolute(),
            kept_path=output.with_name(output.name + ".part"),
            effort=SERVER_EFFORTS[arguments.effort],
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
        )
        return await profile_server(task, progress.say, progress.report)


def _config(arguments: argparse.Namespace, url: str) -> EngineConfig:
    """Return the engine options that describe the server. Raises ``ConfigError`` for others."""
    given = vars(arguments)
    for name in _REQUIRED:
        if given.get(name) is None:
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(f"--url {url} also needs {flag}: {_WHY[name]}")
    for name in ("budget_s", "picture"):
        if given[name] is not None:
            raise ConfigError(f"--{name.replace('_', '-')} cannot be used with --url")
    (config,) = build_configs(
        given, (EngineConfig,), environment=os.environ, command="profile"
    )  # fmt: skip
    for spec in option_specs(EngineConfig):
        is_used = spec.name in _USED or spec.name == "max_num_seqs"
        if given.get(spec.name) is not None and not is_used:
            raise ConfigError(
                f"{spec.flag} cannot be used with --url: it does not change a running server"
            )
    assert isinstance(config, EngineConfig)
    return config


_WHY = {
    "output": "the file of the profile, for corun cluster --engine",
    "max_num_batched_tokens": "the value that the server was started with",
    "max_num_seqs": "the value that the server was started with",
}

"""The engine process: ``python -m corun.runtime.engine.process --fd N --heartbeat-fd M ...``.

Descriptor N is the process's end of a socket pair; the first frame on it is the ``EngineConfig``.
Descriptor M holds the numbers of its heartbeat.
The process lives as long as the other end: it ignores SIGINT and SIGTERM, which reach whole
groups of processes, so that the front end decides when to drain and when to stop. On SIGUSR2 it
prints the stacks of its threads. It dies with its parent. The exit status is 0 after ``Shutdown``
or the channel's end, otherwise 1.
"""

import argparse
import faulthandler
import importlib
import logging
import os
import signal
import socket
import sys
from typing import Any, cast

import msgspec

from ...cpu_workers.process_life import OrphanError, exit_process, own_child_process
from ..config.codec import config_from_dict
from ..config.engine import EngineConfig
from ..config.environment import own_environment
from ..errors import CorunError
from .channel import Channel, ChannelError, receive_one_frame
from .heartbeat import Heartbeat, beating
from .loop import BuildEngine, serve_channel
from .messages import ToEngine
from .spawn import DEFAULT_FACTORY

STACKS_SIGNAL = signal.SIGUSR2
_CONFIG_TIMEOUT_S = 30.0
_LOG_FORMAT = "%(asctime)s %(levelname)s engine %(name)s: %(message)s"

_logger = logging.getLogger(__name__)


def load_factory(dotted_name: str) -> BuildEngine:
    """Return the function that ``module:name`` names."""
    module_name, _, name = dotted_name.partition(":")
    return cast(BuildEngine, getattr(importlib.import_module(module_name), name))


def main(arguments: list[str] | None = None) -> int:
    """Run the process; return its exit status."""
    parser = argparse.ArgumentParser(prog="corun engine")
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--heartbeat-fd", type=int, required=True)
    parser.add_argument("--parent-pid", type=int, required=True)
    parser.add_argument("--factory", default=DEFAULT_FACTORY)
    parser.add_argument("--log-level", default="info")
    options = parser.parse_args(arguments)

    try:
        own_child_process(options.parent_pid)
    except OrphanError:
        return 1
    faulthandler.register(STACKS_SIGNAL)
    logging.basicConfig(level=options.log_level.upper(), format=_LOG_FORMAT, stream=sys.stderr)
    for fd in (options.fd, options.heartbeat_fd):
        os.set_inheritable(fd, False)
    sock = socket.socket(fileno=options.fd)
    try:
        config = _receive_config(sock)
        # Before loading any library that examines the processor or starts CUDA.
        os.environ.update(own_environment(config.cpu_isa, os.environ))
        channel: Channel[ToEngine] = Channel(sock, ToEngine)
        factory = load_factory(options.factory)
        heartbeat = Heartbeat(options.heartbeat_fd)
        with beating(heartbeat):
            has_served = serve_channel(channel, config, factory, heartbeat, own_process=True)
            return 0 if has_served else 1
    except CorunError as error:
        _logger.error("the engine has stopped: %s", error)
        return 1
    except Exception:
        _logger.exception("the engine has stopped because of an unexpected error")
        return 1
    finally:
        sock.close()


def _receive_config(sock: socket.socket) -> EngineConfig:
    """Wait for the first frame; later ones stay in the socket."""
    sock.settimeout(_CONFIG_TIMEOUT_S)
    try:
        payload = receive_one_frame(sock)
    except TimeoutError as error:
        raise ChannelError(f"no configuration arrived within {_CONFIG_TIMEOUT_S} s") from error
    return config_from_dict(EngineConfig, msgspec.msgpack.decode(payload, type=dict[str, Any]))


if __name__ == "__main__":
    exit_process(main())

"""``corun serve`` whose cold requests start with deltas of a CPU worker; no GPU is needed."""

import os
from pathlib import Path
from typing import Any

import psutil
from corun.runtime.config.demo import with_demo
from corun.runtime.config.engine import EngineConfig
from support.model_profiles import Figures, save_made_up_profile
from support.serving import Served

# A load takes seconds, so that it is still under way when a slow machine starts its request.
LINK_GIB_PER_S = 0.0005
SLOWDOWN = 150  # of workers: with their help, a pass takes a good part of a second, too


def assisted_options(directory: Path) -> list[str]:
    """Options of ``corun serve`` with the demo; writes a profile to ``directory``."""
    cpus = sorted(os.sched_getaffinity(0))
    values: dict[str, Any] = {
        "dtype": "bfloat16",
        "link_gib_per_s": LINK_GIB_PER_S,
        "load_strategy": "assisted",
        "engine_cores": str(cpus[0]),
        "cpu_cores": str(cpus[-1]),
        "worker_slowdown": SLOWDOWN,
    }
    profile = save_made_up_profile(
        with_demo(EngineConfig(device="cpu", **values)),
        directory / "profile.json",
        Figures(link_bytes_per_s=LINK_GIB_PER_S * 2**30),
    )
    return [
        text
        for name, value in (values | {"profile": profile}).items()
        for text in (f"--{name.replace('_', '-')}", str(value))
    ]


def all_processes(server: Served) -> list[psutil.Process]:
    root = psutil.Process(server.process.pid)
    return [root, *root.children(recursive=True)]


def running(server: Served, module: str) -> list[psutil.Process]:
    """The live processes of this module: ``worker`` or ``supervisor``."""
    found = []
    for process in all_processes(server):
        try:
            if f"corun.cpu_workers.{module}" in process.cmdline():
                found.append(process)
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
    return found

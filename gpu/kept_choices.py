"""Paths of stored measurements of this machine, which later starts reuse."""

import hashlib
import os
from pathlib import Path

import numba
import torch
import transformers

from .. import __version__ as corun_version
from ..cpu_workers.kernels.simd.isa import process_isa
from ..runtime.machine.facts import read_cpu_model


def choice_path(directory: Path | None, *facts: object) -> Path | None:
    """The path for a measurement of ``facts`` on this kind of machine, with these versions.

    ``directory``: of all stored measurements; None = nothing is stored.
    """
    if directory is None:
        return None
    machine = read_cpu_model(), process_isa().name, os.cpu_count()
    versions = corun_version, transformers.__version__, str(torch.__version__), numba.__version__
    digest = hashlib.sha256(repr((machine, versions, facts)).encode()).hexdigest()
    return directory / "choices" / f"{digest}.json"

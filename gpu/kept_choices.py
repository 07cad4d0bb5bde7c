"""Paths of stored measurements of this machine, which later starts reuse."""

import hashlib
import os
from pathlib import Path

import numba
import torch
import transformers

from .. import __version__ as corun_version
from ..cpu_workers.kernels.simd.compiled import sources_digest
from ..cpu_workers.kernels.simd.isa import has_matrix_registers, process_isa
from ..runtime.machine.facts import read_cpu_model

_KERNELS = Path(__file__).parents[1] / "cpu_workers" / "kernels"


def choice_path(directory: Path | None, *facts: object) -> Path | None:
    """The path for a measurement of ``facts`` on this kind of machine, with these versions.

    ``directory``: of all stored measurements; None = nothing is stored.
    """
    if directory is None:
        return None
    machine = read_cpu_model(), process_isa().name, has_matrix_registers(), os.cpu_count()
    versions = corun_version, transformers.__version__, str(torch.__version__), numba.__version__
    # Kernels change between releases: what was measured of others says nothing of these.
    kernels = sources_digest(_KERNELS / "linear"), sources_digest(_KERNELS / "attention")
    digest = hashlib.sha256(repr((machine, versions, kernels, facts)).encode()).hexdigest()
    return directory / "choices" / f"{digest}.json"

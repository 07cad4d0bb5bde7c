"""Facts about a base model for ``corun check``, stored so that a second check imports no torch.

They come from ``gpu/model/skeleton.py``, as for a start, and are stored with digests of everything
they depend on: the configuration, the files of the model's classes, and versions.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from ....gpu.model import source as source_module
from ....gpu.model.source import ModelSource, check_directory, warn_of_adapter
from ...adapters.base_names import ServedBase
from ...adapters.target_map import TargetMap
from ...kept_records import read_record, write_record

_PACKAGES = ("torch", "transformers")


@dataclass(frozen=True, slots=True)
class KnownBase:
    """Facts about a base model that need no weights."""

    target_map: TargetMap
    dtype: str  # for serving
    served: ServedBase
    code: dict[str, str]  # SHA-256 of the files that the facts come from, by path


def known_base(source: ModelSource, dtype: str, directory: Path | None) -> KnownBase:
    """Read the stored facts of a model, or build its modules and store their facts.

    ``dtype``: as for ``--dtype``. ``directory``: of the stored facts; None = not stored. Facts are
    stored only for models in local directories without code of their own: others can change
    elsewhere. Raises ``ModelError``.
    """
    check_directory(source)
    path = None
    if directory is not None and Path(source.path).is_dir() and not source.trust_remote_code:
        path = directory / f"{_digest(source, dtype)}.base.json"
        known = read_record(path, KnownBase)
        if known is not None and _digests(map(Path, known.code)) == known.code:
            warn_of_adapter(source)
            return known
    known = _find(source, dtype)
    if path is not None:
        write_record(path, known, "the next check builds the model's modules again")
    return known


def _find(source: ModelSource, dtype: str) -> KnownBase:
    from ....gpu.model.load import resolve_dtype
    from ....gpu.model.skeleton import target_map_and_code_of
    from ....gpu.model.source import load_config
    from .base_model import read_served_base

    target_map, code = target_map_and_code_of(source)
    served_dtype = str(resolve_dtype(dtype, load_config(source))).removeprefix("torch.")
    own = sorted(Path(source_module.__file__).parent.glob("*.py"))  # the source of the facts
    return KnownBase(target_map, served_dtype, read_served_base(source), _digests((*code, *own)))


def _digest(source: ModelSource, dtype: str) -> str:
    """Return the digest that names a record: the model's path and configuration, and versions."""
    directory = Path(source.path)
    versions = [metadata.version(package) for package in _PACKAGES]
    files = _digests(sorted(directory.glob("config*.json")))
    question = (source.path, str(directory.resolve()), dtype, versions, files)
    return hashlib.sha256(repr(question).encode()).hexdigest()


def _digests(files: Iterable[Path]) -> dict[str, str]:
    """Return the SHA-256 of each readable file."""
    found = {}
    for file in files:
        try:
            found[str(file)] = hashlib.sha256(file.read_bytes()).hexdigest()
        except OSError:
            continue
    return found

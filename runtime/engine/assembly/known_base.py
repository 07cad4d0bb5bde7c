"""What ``corun check`` needs of a base model, kept so that a second check imports no torch.

``gpu/model/skeleton.py`` decides, as it does for a start; what it said is kept with digests of all
that it depends on: the configuration, the files of the model's classes, and versions.
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
from ...kept_records import keep, read_kept

_PACKAGES = ("torch", "transformers")


@dataclass(frozen=True, slots=True)
class KnownBase:
    """A base model as far as no weights are needed."""

    target_map: TargetMap
    dtype: str  # that it is served in
    served: ServedBase
    code: dict[str, str]  # SHA-256 of the files that have said so, by path


def known_base(source: ModelSource, dtype: str, directory: Path | None) -> KnownBase:
    """Read what is kept of a model, or build its modules and keep what they say.

    ``dtype``: as ``--dtype`` takes it. ``directory``: where records are kept; None = nowhere. Only
    models in directories are kept that bring no code of their own: of others another computer
    decides what is the newest. Raises ``ModelError``.
    """
    check_directory(source)
    path = None
    if directory is not None and Path(source.path).is_dir() and not source.trust_remote_code:
        path = directory / f"{_digest(source, dtype)}.base.json"
        known = read_kept(path, KnownBase)
        if known is not None and _digests(map(Path, known.code)) == known.code:
            warn_of_adapter(source)
            return known
    known = _find(source, dtype)
    if path is not None:
        keep(path, known, "the next check builds the model's modules again")
    return known


def _find(source: ModelSource, dtype: str) -> KnownBase:
    from ....gpu.model.load import resolve_dtype
    from ....gpu.model.skeleton import target_map_and_code_of
    from ....gpu.model.source import load_config
    from .base_model import read_served_base

    target_map, code = target_map_and_code_of(source)
    served_dtype = str(resolve_dtype(dtype, load_config(source))).removeprefix("torch.")
    own = sorted(Path(source_module.__file__).parent.glob("*.py"))  # what has decided
    return KnownBase(target_map, served_dtype, read_served_base(source), _digests((*code, *own)))


def _digest(source: ModelSource, dtype: str) -> str:
    """Of what names a record: where the model is, what it says of itself, versions."""
    directory = Path(source.path)
    versions = [metadata.version(package) for package in _PACKAGES]
    files = _digests(sorted(directory.glob("config*.json")))
    question = (source.path, str(directory.resolve()), dtype, versions, files)
    return hashlib.sha256(repr(question).encode()).hexdigest()


def _digests(files: Iterable[Path]) -> dict[str, str]:
    """SHA-256 of each file that can be read."""
    found = {}
    for file in files:
        try:
            found[str(file)] = hashlib.sha256(file.read_bytes()).hexdigest()
        except OSError:
            continue
    return found

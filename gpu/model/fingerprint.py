"""Identifies a base model's content for KV namespaces, and its code, without reading weights."""

import hashlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .source import ModelSource

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def model_fingerprint(source: ModelSource, config: Any, quantization: str = "") -> str:
    """Hash the configuration with the identity of the weights: hexadecimal SHA-256.

    For a hub model that is its commit; for a directory the name, size and modification time of its
    weight files. ``quantization``: the format to which the weights are converted at start.
    """
    digest = hashlib.sha256(config.to_json_string(use_diff=False).encode())
    digest.update(quantization.encode())
    digest.update(str(getattr(config, "_commit_hash", None) or source.revision).encode())
    directory = Path(source.path)
    if directory.is_dir():
        for file in sorted(directory.glob("*.safetensors")):
            stat = file.stat()
            digest.update(f"{file.name}\0{stat.st_size}\0{stat.st_mtime_ns}\0".encode())
    return digest.hexdigest()


def code_files(model: "PreTrainedModel") -> tuple[Path, ...]:
    """The source files of the classes of a model and of its configuration.

    Excludes torch and corun, which have versions.
    """
    classes = {type(model.config), *map(type, model.modules())}
    names = {base.__module__ for cls in classes for base in cls.__mro__}
    files = {
        getattr(sys.modules.get(name), "__file__", None)
        for name in names
        if not name.startswith(("torch.", f"{__package__.split('.')[0]}."))
    }
    return tuple(sorted(Path(file) for file in files if file is not None))

"""Names a base model's content for the KV namespaces, and its code, without reading its weights."""

import hashlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .source import ModelSource

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def model_fingerprint(source: ModelSource, config: Any, quantization: str = "") -> str:
    """Hash the configuration with what identifies the weights: hexadecimal SHA-256.

    For a hub model that is its commit; for a directory the name, size and modification time of
    its weight files. ``quantization``: what the weights in the files were made of at start.
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
    """The files that the classes of a model and of its configuration come from.

    Without torch's and ours, which have versions.
    """
    classes = {type(model.config), *map(type, model.modules())}
    names = {base.__module__ for cls in classes for base in cls.__mro__}
    files = {
        getattr(sys.modules.get(name), "__file__", None)
        for name in names
        if not name.startswith(("torch.", f"{__package__.split('.')[0]}."))
    }
    return tuple(sorted(Path(file) for file in files if file is not None))

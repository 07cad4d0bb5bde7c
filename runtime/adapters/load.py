"""Reads a PEFT directory for one model: configuration, tensors, targets and digest in one call."""

from dataclasses import dataclass
from pathlib import Path

from ..errors import AdapterError
from .checkpoint import content_digest, read_checkpoint
from .lora_spec import LoraSpec
from .peft_config import read_peft_config
from .resolve import ResolveError, max_tensor_bytes, resolve_adapter
from .resolved import ResolvedAdapter
from .target_map import TargetMap


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """An adapter read from a directory, which fits the model; holds the tensors' bytes."""

    spec: LoraSpec
    adapter: ResolvedAdapter
    digest: str  # hexadecimal SHA-256 of configuration and tensors


def read_adapter(directory: Path, target_map: TargetMap, *, max_rank: int) -> AdapterFiles:
    """Read, check and digest the adapter in ``directory``.

    Raises ``AdapterError`` naming the file and what is wrong.
    """
    spec = read_peft_config(directory)
    tensors = read_checkpoint(directory, max_tensor_bytes=max_tensor_bytes(target_map, max_rank))
    try:
        adapter = resolve_adapter(spec, tensors, target_map, max_rank=max_rank)
    except ResolveError as error:
        raise AdapterError(f"{directory}: {error}") from error
    return AdapterFiles(spec, adapter, content_digest(spec, tensors))

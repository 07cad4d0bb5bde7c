"""Opens a PEFT directory for one model: what it is first, its tensors in one pass."""

from collections.abc import Iterator
from pathlib import Path
from typing import Self

from .checkpoint import Checkpoint, ContentDigest
from .lora_spec import LoraSpec
from .peft_config import read_peft_config
from .resolve import ResolveError, max_tensor_bytes, resolve_adapter
from .resolved import RawTensor, ResolvedAdapter
from .target_map import TargetMap


class OpenAdapter:
    """An adapter that fits the model, and its open file; see ``resolved.AdapterReader``."""

    def __init__(self, spec: LoraSpec, adapter: ResolvedAdapter, checkpoint: Checkpoint) -> None:
        """Takes ``checkpoint`` over."""
        self.spec = spec
        self.adapter = adapter
        self._checkpoint = checkpoint
        self._digest: str | None = None

    @property
    def digest(self) -> str:
        """Hexadecimal SHA-256 of configuration and tensors, once all have been read."""
        assert self._digest is not None, "not all tensors have been read"
        return self._digest

    def tensors(self) -> Iterator[tuple[RawTensor, memoryview]]:
        """Read the tensors in the order of their names and digest them on the way."""
        digest = ContentDigest(self.spec)
        for tensor, data in self._checkpoint.read():
            digest.add(tensor, data)
            yield tensor, data
        self._digest = digest.hexdigest()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._checkpoint.close()


def open_adapter(directory: Path, target_map: TargetMap, *, max_rank: int) -> OpenAdapter:
    """Open the adapter in ``directory`` and check all that needs none of its values.

    Raises ``AdapterError`` naming the file and what is wrong; ``ResolveError``, which is one, with
    every problem if it does not fit the model.
    """
    spec = read_peft_config(directory)
    checkpoint = Checkpoint(directory, max_tensor_bytes=max_tensor_bytes(target_map, max_rank))
    try:
        adapter = resolve_adapter(spec, checkpoint.tensors, target_map, max_rank=max_rank)
    except ResolveError as error:
        checkpoint.close()
        raise ResolveError(error.problems, directory) from None
    except BaseException:
        checkpoint.close()
        raise
    return OpenAdapter(spec, adapter, checkpoint)

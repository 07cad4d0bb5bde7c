"""Opens a PEFT directory for one model: first its header, then its tensors layer by layer."""

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Self

from ..errors import AdapterError
from .checkpoint import Checkpoint
from .digest import ContentDigest, LayerDigest, digest_head
from .folder_files import OWN_FILES, AdapterRoots
from .lora_spec import LoraSpec
from .peft_config import read_peft_config
from .resolve import ResolveError, max_tensor_bytes, resolve_adapter
from .resolved import BaseWeights, RawTensor, ResolvedAdapter, TakeTensor
from .target_map import TargetMap
from .tensor_names import SAVED_MODULES_REASON
from .values import check_magnitudes


class OpenAdapter:
    """An adapter that fits the model, and its open file; see ``resolved.AdapterReader``."""

    def __init__(
        self, spec: LoraSpec, adapter: ResolvedAdapter, checkpoint: Checkpoint,
        base: BaseWeights | None,
    ) -> None:  # fmt: skip
        """Takes ownership of ``checkpoint``."""
        self.spec = spec
        self.adapter = adapter
        self._checkpoint = checkpoint
        self._base = base
        self._digest: ContentDigest | None = None
        self._expected: ContentDigest | None = None

    @cached_property
    def _head(self) -> bytes:
        kinds = [(tensor.name, tensor.dtype, tensor.shape) for tensor in self._checkpoint.tensors]
        return digest_head(self.spec.effective_fields(), kinds)

    @property
    def digest(self) -> ContentDigest:
        """The digest of configuration and tensors, once all have been read."""
        assert self._digest is not None, "not all tensors have been read"
        return self._digest

    def expect(self, digest: ContentDigest) -> None:
        """Accept only this content; raises ``AdapterError`` if the header already differs."""
        self._expected = digest
        if self._head != digest.head:
            raise self._changed()

    def read_layers(self, take: TakeTensor) -> Iterator[int]:
        """Pass the tensors to ``take`` by layers, within a layer in the order of their names.

        A layer is yielded when it is complete and, after ``expect``, has been verified.
        """
        if self._expected is None:
            self._check_copies()
        digests: list[bytes] = []
        for index, (layer, tensors) in enumerate(self._tensors_by_layer().items()):
            digest = LayerDigest()
            for tensor, data in self._checkpoint.read(tensors):
                digest.add(data)
                try:
                    take(tensor, data)
                except AdapterError as error:
                    raise AdapterError(f"{self._checkpoint.path.parent}: {error}") from error
            digests.append(digest.digest())
            # Writes to the file meanwhile do not matter while the content is the same.
            if self._expected is not None and digests[index] != self._expected.layers[index]:
                raise self._changed()
            yield layer
        if self._expected is None:
            self._checkpoint.check_unchanged()
        self._digest = ContentDigest(self._head, tuple(digests))

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._checkpoint.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def check_magnitudes(self) -> None:
        """Check the magnitudes of DoRA. Raises ``AdapterError`` with a tensor's name."""
        found = [lora.magnitudes for lora in self.adapter.targets if lora.magnitudes is not None]
        for tensor, data in self._checkpoint.read(found):
            try:
                check_magnitudes(tensor, data)
            except AdapterError as error:
                raise AdapterError(f"{self._checkpoint.path.parent}: {error}") from error

    def _check_copies(self) -> None:
        """Refuse tensors beside LoRA that differ from the base's."""
        problems = [
            f"{copy.tensor.name}: its values differ from those of the base model's "
            f"{copy.base_name}; {SAVED_MODULES_REASON}"
            for copy in self.adapter.copies
            if self._base is None
            or not self._base.has_values(
                copy.base_name, copy.tensor, self._checkpoint.read_rows(copy.tensor)
            )
        ]
        if problems:
            raise ResolveError(problems, self._checkpoint.path.parent)

    def _tensors_by_layer(self) -> dict[int, list[RawTensor]]:
        """Return tensors by layer, ascending, not by name (layers.10 sorts before layers.2)."""
        by_layer: dict[int, list[RawTensor]] = {}
        for lora in sorted(self.adapter.targets, key=lambda lora: lora.target.layer):
            by_layer.setdefault(lora.target.layer, []).extend(lora.tensors)
        for tensors in by_layer.values():
            tensors.sort(key=lambda tensor: tensor.name)
        return by_layer

    def _changed(self) -> AdapterError:
        return AdapterError(
            f"the files in {self._checkpoint.path.parent} have changed since the adapter was "
            "registered; register it again to serve the new content"
        )


def open_adapter(
    directory: Path, target_map: TargetMap, *, max_rank: int, base: BaseWeights | None = None,
    roots: AdapterRoots = OWN_FILES,
) -> OpenAdapter:  # fmt: skip
    """Open the adapter in ``directory`` and check everything except the values of A and B.

    ``base``: compared with weights of the base model in the file; None = such weights are refused.
    ``roots``: where links in the directory may lead. Raises ``AdapterError`` with the file and the
    problem, or its subclass ``ResolveError`` with every problem if the adapter does not fit the
    model.
    """
    spec = read_peft_config(directory, roots)
    max_bytes = max_tensor_bytes(target_map, max_rank)
    checkpoint = Checkpoint(directory, max_tensor_bytes=max_bytes, roots=roots)
    try:
        adapter = resolve_adapter(spec, checkpoint.tensors, target_map, max_rank=max_rank)
        opened = OpenAdapter(spec, adapter, checkpoint, base)
        opened.check_magnitudes()
    except ResolveError as error:
        checkpoint.close()
        raise ResolveError(error.problems, directory) from None
    except BaseException:
        checkpoint.close()
        raise
    return opened

"""Opens a PEFT directory for one model: first its header, then its tensors layer by layer."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from ..errors import AdapterChangedError, AdapterError
from ..file_calls import FILES, Place, SilentError
from .checkpoint import Checkpoint
from .digest import ContentDigest, LateDigests, LayerDigest, digest_head
from .folder_files import OWN_FILES, AdapterRoots
from .lora_spec import LoraSpec
from .peft_config import read_peft_config
from .resolve import ResolveError, max_tensor_bytes, resolve_adapter
from .resolved import BaseWeights, FileHeader, RawTensor, ResolvedAdapter, SavedWeight, TakeTensors
from .target_map import TargetMap
from .tensor_names import SAVED_MODULES_REASON
from .token_rows import Spans, spans_beside, with_kept
from .values import check_magnitudes, check_values


class OpenAdapter:
    """An adapter that fits the model, and its open file; see ``resolved.AdapterReader``."""

    def __init__(
        self, spec: LoraSpec, adapter: ResolvedAdapter, checkpoint: Checkpoint, base: BaseWeights | None
    ) -> None:
        """Takes ownership of ``checkpoint``."""
        self.spec = spec
        self.outline = adapter
        self._checkpoint = checkpoint
        self._base = base
        self._digest: ContentDigest | None = None
        self._expected: ContentDigest | None = None
        self._kept: dict[str, Spans] | None = None  # None = not known yet
        self._is_resumed = False

    @cached_property
    def adapter(self) -> ResolvedAdapter:
        """All of the adapter; see ``resolved.AdapterReader``."""
        if self._kept is None:
            self._kept = self._compare()
        return with_kept(self.outline, self._kept)

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
        self._kept = dict(digest.kept)

    def begin(self) -> FileHeader | None:
        """See ``resolved.AdapterReader``."""
        needs_values = self.outline.saved or self.outline.rows
        if needs_values:
            return None
        return FileHeader(self.spec, self._checkpoint.tensors, self._checkpoint.stamp)

    def resume(self, header: FileHeader) -> None:
        """See ``resolved.AdapterReader``."""
        if self.begin() != header:
            raise AdapterChangedError(
                f"the files in {self._checkpoint.path.parent} changed before they were first read; "
                "send the request again to have the new content"
            )
        self._is_resumed = True

    def read_layers(self, take: TakeTensors) -> Iterator[int]:
        """Pass the tensors to ``take`` by layers, within a layer in the order of their names.

        A layer is yielded when it is complete and, after ``expect``, has been verified. Without
        ``expect`` the last one is yielded once the file is known not to have changed meanwhile.
        After ``resume`` the values are hashed when all layers have been yielded.
        """
        by_layer = self._tensors_by_layer()
        if self._is_resumed:
            yield from self._read_first(by_layer, take)
            return
        digests: list[bytes] = []
        for index, (layer, tensors) in enumerate(by_layer.items(), start=1):
            digest = LayerDigest()
            for stored, parts in self._checkpoint.read_batches(tensors):
                digest.add(parts)
                with self._named_errors():
                    take(stored)
            digests.append(digest.digest())
            # Writes to the file meanwhile do not matter while the content is the same.
            if self._expected is not None and digests[-1] != self._expected.layers[index - 1]:
                raise self._changed()
            if index == len(by_layer):
                if self._expected is None:
                    self._checkpoint.check_unchanged()
                self._end(digests)
            yield layer

    def _read_first(self, by_layer: Mapping[int, Sequence[RawTensor]], take: TakeTensors) -> Iterator[int]:
        with LateDigests(len(by_layer)) as late:
            for number, (layer, tensors) in enumerate(by_layer.items()):
                for stored, parts in self._checkpoint.read_batches(tensors, late.room):
                    late.add(number, parts)
                    with self._named_errors():
                        take(stored)
                if number + 1 == len(by_layer):
                    self._checkpoint.check_unchanged()
                yield layer
            self._end(late.digests())

    def close(self) -> None:
        self._checkpoint.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def check_small_tensors(self) -> None:
        """Check the magnitudes of DoRA and the rows of tokens. Raises ``AdapterError``."""
        adapter = self.outline
        magnitudes = [lora.magnitudes for lora in adapter.targets if lora.magnitudes is not None]
        for tensor, data in self._checkpoint.read(magnitudes):
            with self._named_errors():
                check_magnitudes(tensor, data)
        rows = [run.tensor for one in adapter.rows for run in one.runs]
        for tensor, data in self._checkpoint.read(rows):
            with self._named_errors():
                check_values(tensor, data, "float32")

    def _compare(self) -> dict[str, Spans]:
        """Return the tokens with rows of saved weights that differ from the base's, by module.

        Raises ``AdapterError`` for other weights that differ, and for values that are not finite.
        """
        kept: dict[str, Spans] = {}
        problems: list[str] = []
        rows_of = {one.target.index: one for one in self.outline.rows}
        for weight in self.outline.saved:
            differs = self._differing_rows(weight)
            if weight.target is not None:
                rows = rows_of[weight.target.index]
                kept[weight.target.path] = spans_beside(rows, differs)
                if kept[weight.target.path] and rows.refusal:
                    problems.append(rows.refusal)
            elif differs.any():
                problems.append(
                    f"{weight.tensor.name}: its values differ from those of the base model's "
                    f"{weight.base_name}; {SAVED_MODULES_REASON}"
                )
        if problems:
            raise ResolveError(problems, self._checkpoint.path.parent)
        return kept

    def _differing_rows(self, weight: SavedWeight) -> NDArray[np.bool_]:
        """Compare a weight with the base's; all its values must be finite."""

        def checked_parts() -> Iterator[memoryview]:
            for part in self._checkpoint.read_rows(weight.tensor):
                with self._named_errors():
                    check_values(weight.tensor, part, "float32")
                yield part

        if self._base is None:
            return np.ones(weight.tensor.shape[0], np.bool_)
        return self._base.differing_rows(weight.base_name, weight.tensor, checked_parts())

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        """Put the directory before the text of errors."""
        try:
            yield
        except AdapterError as error:
            raise AdapterError(f"{self._checkpoint.path.parent}: {error}") from error

    def _end(self, digests: Sequence[bytes]) -> None:
        """All layers have been read, with these digests."""
        assert self._kept is not None
        self._digest = ContentDigest(self._head, tuple(digests), kept=tuple(sorted(self._kept.items())))

    def _tensors_by_layer(self) -> dict[int, list[RawTensor]]:
        """Return tensors by layer, ascending, not by name (layers.10 sorts before layers.2)."""
        by_layer: dict[int, list[RawTensor]] = {}
        for lora in self.adapter.targets:
            by_layer.setdefault(lora.target.layer, []).extend(lora.tensors)
        for rows in self.adapter.rows:
            if rows.changes_base:
                tensors = [run.tensor for run in rows.runs]
                by_layer.setdefault(rows.target.layer, []).extend(tensors)
        for tensors in by_layer.values():
            tensors.sort(key=lambda tensor: tensor.name)
        return dict(sorted(by_layer.items()))

    def _changed(self) -> AdapterError:
        return AdapterError(
            f"the files in {self._checkpoint.path.parent} have changed since the adapter was "
            "registered; register it again to serve the new content"
        )


def open_adapter(
    directory: Path,
    target_map: TargetMap,
    *,
    max_rank: int,
    base: BaseWeights | None = None,
    roots: AdapterRoots = OWN_FILES,
) -> OpenAdapter:
    """Open the adapter in ``directory`` and check everything except the values of A and B.

    ``base``: compared with weights of the base model in the file; None = all of these differ.
    ``roots``: where links in the directory may lead. Raises ``AdapterError`` with the file and the
    problem, or its subclass ``ResolveError`` with every problem if the adapter does not fit the
    model.
    """
    max_bytes = max_tensor_bytes(target_map, max_rank)

    def read_headers(_: Place) -> tuple[LoraSpec, Checkpoint]:
        spec = read_peft_config(directory, roots)
        return spec, Checkpoint(directory, max_tensor_bytes=max_bytes, roots=roots)

    try:
        spec, checkpoint = FILES.call(read_headers, str(directory))  # their calls are parts of it
    except SilentError as error:
        raise AdapterError(f"cannot read {directory}: {error.strerror}") from error
    try:
        adapter = resolve_adapter(spec, checkpoint.tensors, target_map, max_rank=max_rank)
        opened = OpenAdapter(spec, adapter, checkpoint, base)
        opened.check_small_tensors()
    except ResolveError as error:
        checkpoint.close()
        raise ResolveError(error.problems, directory) from None
    except BaseException:
        checkpoint.close()
        raise
    return opened

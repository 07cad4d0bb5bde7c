"""The base's linears in 8 or 4 bits: which of them, from which tensors, and how they are made.

Full weights are read and quantised matrix by matrix, some rows at a time, so that a start needs
little more memory than serving. transformers loads the rest of the model as usual, with
placeholders for these matrices.
"""

import hashlib
import logging
import math
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from ... import __version__
from ...cpu_workers.affinity import limit_torch_threads
from ...cpu_workers.kernels.simd.layout import GROUP_SIZE
from ...cpu_workers.kernels.simd.layout import quantized_panel_columns as panel_columns
from ...runtime.adapters.target_map import EXPERTS_REASON
from ...runtime.adapters.tensor_names import PathIndex
from ...runtime.errors import ModelError
from ..forward.kernel_threads import num_kernel_threads
from ..linear.base import LinearBackend
from ..linear.kept_weights import KeptWeights, LateWeights, cached_answer
from ..linear.quantized import QuantizedWeight, quantize_into, unfilled
from ..linear.quantized_linear import TAGS, DequantizedLinear, PackedWeight, QuantizedLinear
from .four_bit import find_four_bit
from .full_files import Found, FullFiles
from .load import load_model
from .mxfp4 import find_mxfp4
from .quantization_plan import Quantization
from .scaled import find_floats, find_integers
from .skeleton import Skeleton, build_skeleton
from .source import ModelSource
from .stored_integers import find_stored_integers
from .stored_quantization import StoredQuantization
from .targets import build_target_map
from .weight_files import WeightFiles

_LOG = logging.getLogger(__name__)

_WEIGHTS_AT_ONCE = 1 << 20  # converted at a time in a thread
_CHECKED_TOKENS = 3
_CHECKED_ROWS = 512
_CHECKED_AT_ONCE = 1 << 17  # weights: their float32 values stay in the processor's cache
_FORM = 3  # of stored matrices; another number after each change of the kernels' layout
# Names of arrays besides that of codes, which names their kind.
_BESIDE, _ORDER = "beside", "order of inputs"
# Relative to the length of the matrix's row, for normal x. The worst of millions of correct
# products is off by 0.05 with x in 8 bits; one that lacks a group, by more than 1.
_MAX_PRODUCT_ERROR = 0.1


@dataclass(frozen=True, slots=True)
class Weights:
    """The memory of all weights of a model, and those that a running engine stores."""

    num_bytes: int
    quantized_bytes: int = 0  # the part of linears in 8 or 4 bits
    kind: str = ""  # their format, for logs; "" = there are none
    label: str = ""  # identifies the conversion of the files, for KV namespaces
    num_in_full: int = 0  # quantised matrices that are read in full beside those as stored
    late: LateWeights | None = None  # to be stored for later starts; None = there is nothing new


def open_files(source: ModelSource, stored: StoredQuantization | None) -> WeightFiles:
    """The files of a checkpoint, with a full matrix in place of each quantised one."""
    if stored is None:
        return WeightFiles(source)

    def find(files: WeightFiles) -> Found:
        found = [
            find_four_bit(files),
            find_integers(files),
            find_floats(files, stored.block),
            find_mxfp4(files),
        ]
        if stored.layout:
            found.append(find_stored_integers(files, stored))
        return Found(
            {name: one for each in found for name, one in each.matrices.items()},
            frozenset().union(*(each.parts for each in found)),
            {name: one for each in found for name, one in each.coded.items()},
        )

    return FullFiles(source, find, stored.method)


class QuantizedLinears:
    """Makes the matrices of one model, and stores them for later starts."""

    def __init__(
        self, source: ModelSource, config: Any, quantization: Quantization, directory: Path | None
    ) -> None:
        """Read the list of tensors. Raises ``ModelError``.

        ``directory``: for storing matrices; None = nothing is stored.
        """
        self._directory = directory
        self._source = source
        self._config = config
        self._quantization = quantization
        self._files = open_files(source, quantization.stored)
        self._bits: dict[str, int | None] = {}  # by path; None = as stored
        self._stored: dict[str, str] = {}  # quantised paths on disk, by path
        self._tensor_of: dict[str, str] = {}  # names on disk, by path; missing = under another name
        self._kept: KeptWeights | None = None
        self._made: dict[str, PackedWeight] = {}
        self._codes = np.empty(0, np.uint8)  # of one matrix: new pages for each would take longer
        self._threads = ThreadPoolExecutor(
            num_kernel_threads(), "corun-quantising", initializer=limit_torch_threads
        )
        self._num_read = 0
        self._narrow: list[str] = []  # linears with inputs that are not whole groups
        self.skeleton: PreTrainedModel  # the model without weights

    def load_rest(self, dtype: torch.dtype, device: torch.device, attention: str) -> PreTrainedModel:
        """Load the model like ``load_model``, with placeholders for the matrices of ``make``.

        Raises ``ModelError``.
        """
        if self._quantization.stored is not None:
            # Otherwise transformers requires the method's own library.
            for name in ("quantization_config", "compression_config"):
                if hasattr(self._config, name):
                    delattr(self._config, name)
        skeleton = build_skeleton(self._source, self._config, attention)
        self.skeleton = skeleton.model
        if isinstance(self._files, FullFiles):
            self._files.transpose(skeleton.transposed)
        linears = _linears(skeleton.model)
        self._choose(skeleton, linears)
        if isinstance(self._files, FullFiles) and self._files.num_quantized:
            assert self._quantization.stored is not None
            _LOG.info(
                "%d matrices of the checkpoint are quantised (%s); %d of them are read in full",
                self._files.num_quantized,
                self._quantization.stored.method,
                self._num_in_full,
            )
        zero = torch.zeros((), dtype=dtype)
        shapes = {
            path: one.weight.T.shape if path in skeleton.transposed else one.weight.shape
            for path, one in linears.items()
        }
        zeros = {
            f"{path}.weight": zero.expand(shapes[path])
            for path, bits in self._bits.items()
            if bits is None or self._tensor_of.get(path) == f"{path}.weight"
        }
        replaced = zeros.keys() | {f"{stored}.weight" for stored in self._stored.values()}
        names = [name for name in self._files.names if name not in replaced]
        with self._files.lazily(names) as tensors:
            return load_model(self._source, self._config, dtype, device, attention, {**tensors, **zeros})

    @property
    def kind(self) -> str:
        """The format of most weights, for logs, such as "int4, head int8"; "" = all in full."""
        plan = self._quantization
        bits = plan.stored_bits if plan.bits is None else {plan.bits}
        kinds = [" and ".join(map(plan.name_of, sorted(bits)))] if bits else []
        if plan.keeps_levels and self._stored:
            assert plan.stored is not None
            kinds.append(plan.stored.levels)
        if plan.bits is not None and plan.head_bits is None:
            kinds.append("head in full")
        elif plan.head_bits is not None and bits != {plan.head_bits}:
            kinds.append(f"head {plan.name_of(plan.head_bits)}")
        return ", ".join(kinds)

    @property
    def task(self) -> str:
        """What ``make`` does, for progress; "" = nothing."""
        return f"quantising weights, or reading kept ones ({self.kind})" if self.kind else ""

    def quantizes_all(self, model: nn.Module) -> bool:
        return all(path in self._bits for path in _linears(model))

    def make(self, path: str, linear: nn.Linear) -> LinearBackend | None:
        """The back end of the linear at ``path``; None if it is unchanged. ``ModelError``."""
        if path not in self._bits:
            return None
        if self._directory is not None and self._kept is None:
            self._kept = self._open_kept(self._directory)
        has_kernel = linear.weight.dtype == torch.bfloat16
        arrays = None if self._kept is None else self._kept.read(path)
        if arrays is None:
            weight = self._weight(path, linear)
            is_w8a8 = self._quantization.is_w8a8
            if is_w8a8 and weight.bits == 8 and weight.group_size != GROUP_SIZE:
                raise ModelError(
                    f"--quantization w8a8 needs weights in groups of {GROUP_SIZE}, but {path} has groups "
                    f"of {weight.group_size}; leave out --quantization to serve it as it is stored"
                )
            packed = PackedWeight.of(weight, is_w8a8=is_w8a8)
            if has_kernel:
                self._check_products(path, packed, weight)
        else:
            packed = _from_arrays(arrays, linear.out_features, linear.in_features)
            if has_kernel and all(packed.name != one.name for one in self._made.values()):
                num_panels = -(-_CHECKED_ROWS // panel_columns())
                self._check_products(path, packed, packed.unpacked(num_panels=num_panels))
            self._num_read += 1
        self._made[path] = packed
        # A copy: the bias itself would keep all of its file mapped.
        bias = None if linear.bias is None else linear.bias.clone()
        return (QuantizedLinear if has_kernel else DequantizedLinear)(packed, bias)

    def finish(self, full_bytes: Mapping[str, int]) -> Weights:
        """The memory of all weights, and what is to be stored for later starts.

        ``full_bytes``: of all original parameters of the model, by name.
        """
        made, self._made = self._made, {}
        self._codes = np.empty(0, np.uint8)
        self._threads.shutdown()
        late = None
        if self._kept is not None:
            self._kept.close()
            if self._num_read < len(made):
                late = LateWeights(self._kept, {path: _arrays(packed) for path, packed in made.items()})
        _warn(self._narrow, f"not quantised, because their input widths are not multiples of {GROUP_SIZE}")
        bits = {path: self._bits[path] for path, packed in made.items() if packed.format.bits == 8}
        of_4 = [
            path for path, one in bits.items() if 8 not in ({one} if one else self._quantization.stored_bits)
        ]
        _warn(of_4, "stored in 8 bits instead of 4, because float16 does not have all of their scales")
        quantized_bytes = sum(array.nbytes for packed in made.values() for array in _arrays(packed).values())
        replaced = {f"{path}.weight" for path in made}
        others = sum(size for name, size in full_bytes.items() if name not in replaced)
        return Weights(
            quantized_bytes + others,
            quantized_bytes,
            self.kind,
            self._quantization.label,
            self._num_in_full if self._stored else 0,
            late,
        )

    @property
    def _num_in_full(self) -> int:
        if not isinstance(self._files, FullFiles):
            return 0
        return self._files.num_quantized - len(self._stored)

    def _choose(self, skeleton: Skeleton, linears: Mapping[str, nn.Linear]) -> None:
        self._stored = self._find_stored(linears)
        stored = self._stored.keys()
        self._bits = dict.fromkeys(stored)
        asked = {path: self._quantization.bits for path in _inside_layers(skeleton.model, linears)}
        head = skeleton.model.get_output_embeddings()
        asked |= {path: self._quantization.head_bits for path, one in linears.items() if one is head}
        for path, bits in asked.items():
            if path in stored or bits is None:
                continue
            if linears[path].in_features % GROUP_SIZE:
                self._narrow.append(path)
            else:
                self._bits[path] = bits
        for path in stored:
            self._check_stored(path, linears[path])
        # A head that is tied to an embedding has the embedding's name on disk.
        shared: dict[int, list[str]] = {}
        for name, parameter in skeleton.model.named_parameters(remove_duplicate=False):
            shared.setdefault(id(parameter), []).append(name)
        for path in self._bits.keys() - stored - skeleton.transposed:
            weight = linears[path].weight
            for name in (f"{path}.weight", *shared[id(weight)]):
                if self._files.shape(name) == tuple(weight.shape):
                    self._tensor_of[path] = name
                    break

    def _find_stored(self, linears: Mapping[str, nn.Linear]) -> dict[str, str]:
        """Paths on disk of linears that are served as stored, by their paths in the model."""
        plan = self._quantization
        if not (plan.stored_bits or plan.keeps_levels) or not isinstance(self._files, FullFiles):
            return {}
        known = PathIndex({path: path for path in linears})
        on_disk = [name.removesuffix(".weight") for name in self._files.coded]
        return {path: one for one in on_disk if (path := known.find(one)) is not None}

    def _check_stored(self, path: str, linear: nn.Linear) -> None:
        """Refuse another size than the model's, and a bias that would be lost.

        Some tools write zeros as the bias of a linear without one.
        """
        name = f"{self._stored[path]}.weight"
        found, shape = self._files.shape(name), (linear.out_features, linear.in_features)
        assert found is not None
        if found != shape:
            raise ModelError(
                f"{name} of {self._source.path!r} is {list(found)}, but config.json asks for {list(shape)}"
            )
        name = f"{self._stored[path]}.bias"
        is_lost = linear.bias is None and self._files.shape(name) is not None
        if is_lost and bool(self._files.read(name).any()):
            raise ModelError(f"{self._source.path!r} has {name}, but the model has no such bias")

    def _open_kept(self, directory: Path) -> KeptWeights:
        stamps = repr(self._files.stamps())
        question = hashlib.sha256(stamps.encode()).hexdigest()
        content = cached_answer(directory, question, lambda: self._files.digest(num_kernel_threads()))
        parts = (content, self._quantization.label, panel_columns(), _FORM, __version__)
        key = hashlib.sha256(repr(parts).encode()).hexdigest()
        return KeptWeights(directory, key, num_kernel_threads())

    def _check_products(self, path: str, packed: PackedWeight, weight: QuantizedWeight) -> None:
        """Compare the kernels' products with the first and last rows. Raises ``ModelError``.

        ``weight``: the matrix before packing, or its first rows. Products differ by the rounding
        of x to integers, and that of y.
        """
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(_CHECKED_TOKENS, weight.codes.shape[1], generator=generator)
        x = x.to(torch.bfloat16)
        actual = QuantizedLinear(packed, None)(x).float()
        num_rows, in_features = weight.codes.shape
        step = max(1, _CHECKED_AT_ONCE // in_features)
        pieces = [
            slice(start, min(start + step, first + _CHECKED_ROWS))
            for first in {0, max(0, num_rows - _CHECKED_ROWS)}
            for start in range(first, min(first + _CHECKED_ROWS, num_rows), step)
        ]
        x = x.float()
        if not all(self._threads.map(lambda rows: _are_products(actual, x, weight, rows), pieces)):
            raise ModelError(
                f"the product with {path} in {weight.bits} bits is wrong on this machine; "
                "leave out --quantization, or choose another --cpu-isa"
            )

    def _weight(self, path: str, linear: nn.Linear) -> QuantizedWeight:
        bits = self._bits[path]
        if bits is None:
            assert isinstance(self._files, FullFiles)
            return self._files.coded[f"{self._stored[path]}.weight"].as_stored()
        name = self._tensor_of.get(path)
        num_rows = max(1, _WEIGHTS_AT_ONCE // linear.in_features)
        shape = linear.out_features, linear.in_features
        if math.prod(shape) > self._codes.size:
            self._codes = np.empty(math.prod(shape), np.uint8)
        made = unfilled(shape, bits, self._codes)

        def fill(start: int) -> None:
            rows = slice(start, start + num_rows)
            read = linear.weight[rows] if name is None else self._files.read(name, rows)
            quantize_into(read, made, rows)

        try:
            list(self._threads.map(fill, range(0, linear.out_features, num_rows)))
        except ValueError as error:
            raise ModelError(
                f"{name or path} of {self._source.path!r} cannot be quantised: {error}"
            ) from error
        return made


def _are_products(actual: torch.Tensor, x: torch.Tensor, weight: QuantizedWeight, rows: slice) -> bool:
    """Whether the columns ``rows`` of ``actual`` are close to the product of ``x`` with these rows."""
    zeros = None if weight.zero_points is None else weight.zero_points[rows]
    part = replace(weight, codes=weight.codes[rows], scales=weight.scales[rows], zero_points=zeros)
    matrix = torch.from_numpy(part.dequantized())
    error = (actual[:, rows] - torch.nn.functional.linear(x, matrix)).abs()
    return bool((error <= _MAX_PRODUCT_ERROR * matrix.norm(dim=1)).all())


def _warn(paths: list[str], what: str) -> None:
    if paths:
        more = " and more" if len(paths) > 3 else ""
        _LOG.warning("%d linears are %s: %s%s", len(paths), what, ", ".join(paths[:3]), more)


def _linears(model: nn.Module) -> dict[str, nn.Linear]:
    """All linears to be replaced, by their first path."""
    return {path: one for path, one in model.named_modules() if type(one) is nn.Linear}


def _inside_layers(skeleton: PreTrainedModel, linears: Mapping[str, nn.Linear]) -> list[str]:
    """Paths of linears in the decoder layers, without routers, which decide by small margins."""
    target_map = build_target_map(skeleton)
    paths = {target.physical_path for target in target_map.inside}
    paths |= {path for path, reason in target_map.refused.items() if reason == EXPERTS_REASON}
    return [path for path in linears if path in paths]


def _arrays(packed: PackedWeight) -> dict[str, np.ndarray]:
    arrays = {packed.name: packed.blocks}
    if packed.beside is not None:
        arrays[_BESIDE] = packed.beside
    if packed.order is not None:
        arrays[_ORDER] = packed.order
    return arrays


def _from_arrays(arrays: Mapping[str, np.ndarray], out_features: int, in_features: int) -> PackedWeight:
    (name,) = TAGS.keys() & arrays.keys()
    return PackedWeight(
        TAGS[name], out_features, in_features, arrays[name], arrays.get(_BESIDE), arrays.get(_ORDER)
    )

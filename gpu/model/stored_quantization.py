"""Quantised checkpoints: which formats are supported, and how their tensors are read.

GPTQ, AWQ and compressed-tensors, weights only, in groups that are multiples of corun's, or with one
scale per channel. Their codes and scales are used unchanged, without dequantising. bitsandbytes in
4 bits has levels that are not integers, and is read as full matrices (``four_bit_files.py``).
Unknown settings that would change the result are refused by name.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ...cpu_workers.kernels.simd.layout import GROUP_SIZE
from ...runtime.adapters.tensor_names import PathIndex
from ...runtime.errors import ModelError
from ..linear.quantized import BITS, QuantizedWeight
from .source import way_to_full_weights
from .weight_files import WeightFiles

_WORD_BITS = 32
# The position of AWQ's column c of eight in the word.
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
_GPTQ_OFFSETS = {"gptq": 1, "gptq_v2": 0}  # added to the zero points on disk
_COMPRESSED_FORMATS = ("pack-quantized", "int-quantized")
_COMPRESSED_FIELDS = frozenset(
    {
        "quant_method", "format", "config_groups", "ignore", "kv_cache_scheme", "version",
        "quantization_status", "sparsity_config", "transform_config", "global_compression_ratio",
    }
)  # fmt: skip
# Tensors of a quantised linear, after its path.
_SUFFIXES = (
    "qweight", "qzeros", "scales", "g_idx",
    "weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class StoredQuantization:
    """The quantisation of all linears according to config.json."""

    method: str  # as config.json calls it
    bits: frozenset[int]  # of its integers; empty = its matrices are read in full
    zero_offset: int = 0  # added to the zero points on disk


def read_stored_quantization(config: Any) -> StoredQuantization | None:
    """The quantisation that ``config`` describes; None if there is none.

    Raises ``ModelError`` with the unsupported setting and advice.
    """
    try:
        return _read(config)
    except ModelError as error:
        name = str(getattr(config, "name_or_path", None) or "model")
        raise ModelError(f"{error}; {way_to_full_weights(name)}") from error


def _read(config: Any) -> StoredQuantization | None:
    found = getattr(config, "quantization_config", None)
    if found is None:
        found = getattr(config, "compression_config", None)
    if found is None:
        return None
    fields: dict[str, Any] = dict(found if isinstance(found, Mapping) else found.to_dict())
    method = str(fields.get("quant_method") or "bitsandbytes")  # early versions have no name
    read = {
        "gptq": _read_gptq, "awq": _read_awq, "compressed-tensors": _read_compressed,
        "bitsandbytes": _read_bitsandbytes,
    }  # fmt: skip
    if method not in read:
        raise ModelError(
            f"the checkpoint is quantised by {method!r}; corun supports {', '.join(read)} and "
            "checkpoints that are not quantised"
        )
    try:
        return read[method](fields)
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        raise ModelError(f"quantization_config of config.json is not valid: {error!r}") from error


def _read_gptq(fields: dict[str, Any]) -> StoredQuantization:
    form = fields.get("checkpoint_format") or fields.get("format") or "gptq"
    if form not in _GPTQ_OFFSETS:
        raise _refused(f"GPTQ in the format {form!r}; corun supports {', '.join(_GPTQ_OFFSETS)}")
    for name in ("adapter", "rotation"):  # computed beside the weights, or instead of them
        if fields.get(name):
            raise _refused(f"GPTQ with {name} {fields[name]!r}")
    bits = _checked_bits("GPTQ", fields["bits"])
    _check_group_size("GPTQ", fields.get("group_size", -1))
    return StoredQuantization("gptq", frozenset({bits}), _GPTQ_OFFSETS[form])


def _read_awq(fields: dict[str, Any]) -> StoredQuantization:
    version = str(fields.get("version", "gemm")).lower()
    bits = fields.get("bits", fields.get("w_bit"))
    if version != "gemm" or bits != 4:
        raise _refused(f"AWQ version {version!r} in {bits} bits; corun supports 'gemm' in 4")
    _check_group_size("AWQ", fields.get("group_size", fields.get("q_group_size", -1)))
    return StoredQuantization("awq", frozenset({4}))


def _read_compressed(fields: dict[str, Any]) -> StoredQuantization:
    unknown = [name for name in sorted(fields.keys() - _COMPRESSED_FIELDS) if fields[name]]
    sparsity = (fields.get("sparsity_config") or {}).get("format", "dense")
    unknown += ["sparsity_config"] if sparsity != "dense" else []
    unknown += [name for name in ("kv_cache_scheme", "transform_config") if fields.get(name)]
    if unknown:
        raise _refused(f"compressed-tensors with {', '.join(unknown)}")
    groups: dict[str, Any] = fields["config_groups"]
    bits = set()
    for group in groups.values():
        form = group.get("format") or fields["format"]
        if form not in _COMPRESSED_FORMATS:
            raise _refused(
                f"compressed-tensors in the format {form!r}; corun supports "
                f"{', '.join(_COMPRESSED_FORMATS)}"
            )
        bits.add(_read_scheme(group))
    return StoredQuantization("compressed-tensors", frozenset(bits))


def _read_scheme(group: dict[str, Any]) -> int:
    """Check one group of the configuration; return its number of bits."""
    for name in ("input_activations", "output_activations"):
        if group.get(name):
            raise _refused(f"compressed-tensors with {name}: quantised activations")
    weights: dict[str, Any] = group["weights"]
    strategy = weights.get("strategy")
    if weights.get("type", "int") != "int" or strategy not in ("group", "channel"):
        raise _refused(
            f"compressed-tensors of type {weights.get('type')!r} by {strategy!r}; corun supports "
            "'int' by 'group' or 'channel'"
        )
    if strategy == "group":
        _check_group_size("compressed-tensors", weights["group_size"])
    return _checked_bits("compressed-tensors", weights["num_bits"])


def _read_bitsandbytes(fields: dict[str, Any]) -> StoredQuantization:
    """Kinds of codes, blocks and types are read from the files, per matrix."""
    if fields.get("load_in_8bit"):
        raise _refused("bitsandbytes in 8 bits; corun supports nf4 and fp4 in 4")
    if not fields.get("load_in_4bit"):
        raise _refused("a quantization_config that names neither a quant_method nor load_in_4bit")
    return StoredQuantization("bitsandbytes", frozenset())


def _checked_bits(method: str, bits: object) -> int:
    if bits not in BITS:
        raise _refused(f"{method} in {bits} bits; corun supports 8 and 4")
    assert isinstance(bits, int)
    return bits


def _check_group_size(method: str, size: int) -> None:
    if size != -1 and (size <= 0 or size % GROUP_SIZE):
        raise _refused(
            f"{method} in groups of {size}; corun supports multiples of {GROUP_SIZE}, and channels"
        )


def _refused(what: str) -> ModelError:
    return ModelError(f"corun does not serve {what}")


def is_stored_tensor(name: str) -> bool:
    """Whether a tensor belongs to a quantised linear, and not to the model's modules."""
    return name.rpartition(".")[2] in _SUFFIXES


def stored_paths(files: WeightFiles) -> frozenset[str]:
    """Paths of all linears that are quantised on disk."""
    paths = {
        name.rpartition(".")[0]
        for name in files.names
        if name.endswith((".qweight", ".weight_packed"))
        or (name.endswith(".weight") and files.dtype(name) == "I8")
    }
    return frozenset(paths)


def stored_linears(
    files: WeightFiles, linears: Iterable[str], left_out: Iterable[str]
) -> dict[str, str]:
    """Paths on disk of those of ``linears`` that are quantised there, by their paths in the model.

    Files of multi-modal models use names of older releases, and contain linears of the parts that
    are ``left_out``. Raises ``ModelError`` for a path that is neither.
    """
    known = PathIndex({path: path for path in linears})
    unused = PathIndex({path: path for path in left_out})
    found = {}
    for stored in sorted(stored_paths(files)):
        path = known.find(stored)
        if path is not None:
            found[path] = stored
        elif unused.find_holder(stored) is None:
            raise ModelError(
                f"the checkpoint has quantised weights that belong to no plain linear: {stored}; "
                "corun does not support them"
            )
    return found


def read_stored(
    files: WeightFiles, path: str, shape: tuple[int, int], stored: StoredQuantization
) -> QuantizedWeight:
    """The linear at ``path`` on disk; ``shape`` of its matrix: [out_features, in_features].

    Raises ``ModelError`` naming it.
    """
    reader = _StoredLinear(files, path, shape)
    if stored.method == "gptq":
        return reader.gptq(stored.zero_offset)
    return reader.awq() if stored.method == "awq" else reader.compressed(stored.bits)


class _StoredLinear:
    """The tensors of one quantised linear. All methods raise ``ModelError``."""

    def __init__(self, files: WeightFiles, path: str, shape: tuple[int, int]) -> None:
        self._files = files
        self._path = path
        self._out, self._in = shape
        if self._in % GROUP_SIZE:
            raise self._wrong(f"its {self._in} inputs are not a multiple of {GROUP_SIZE}")

    def gptq(self, zero_offset: int) -> QuantizedWeight:
        words = self._read("qweight")  # [in * bits / 32, out]
        bits = self._bits(len(words), fits=words.shape[1] == self._out)
        scales = self._read("scales").float().numpy().T  # [groups, out]
        self._check_order("g_idx", self._in // scales.shape[1])
        codes = _fields(words.numpy(), bits).transpose(1, 0, 2).reshape(self._out, self._in)
        zeros = _fields(self._read("qzeros").numpy(), bits)  # [groups, out * bits / 32, …]
        zeros = zeros.reshape(len(zeros), -1)[:, : self._out].T
        return self._weight(bits, codes, scales, zeros.astype(np.int16) + zero_offset)

    def awq(self) -> QuantizedWeight:
        words = self._read("qweight").numpy()  # [in, out / 8]
        scales = self._read("scales").float().numpy().T
        codes = _fields(words, 4)[..., _AWQ_PLACES].reshape(len(words), -1).T
        zeros = _fields(self._read("qzeros").numpy(), 4)[..., _AWQ_PLACES]
        return self._weight(4, codes, scales, zeros.reshape(len(zeros), -1).T)

    def compressed(self, stored_bits: frozenset[int]) -> QuantizedWeight:
        scales = self._read("weight_scale").float().numpy()
        self._check_order("weight_g_idx", self._in // max(1, scales.shape[-1]))
        if self._has("weight_packed"):
            words = self._read("weight_packed")  # [out, in * bits / 32]
            bits = self._bits(words.shape[1], fits=len(words) == self._out)
            codes = _fields(words.numpy(), bits).reshape(self._out, -1)
        else:
            bits = 4 if stored_bits == {4} else 8
            codes = self._unsigned("weight", bits)
        zeros = None
        if self._has("weight_zero_point"):
            zeros = self._read("weight_zero_point").numpy()
            if zeros.dtype == np.int32:  # [out * bits / 32, groups]
                packed = _fields(zeros, bits)
                zeros = packed.transpose(0, 2, 1).reshape(-1, packed.shape[1])[: self._out]
            else:
                zeros = zeros.astype(np.int16) + (1 << (bits - 1))
        return self._weight(bits, codes, scales, zeros)

    def _unsigned(self, name: str, bits: int) -> np.ndarray:
        """Unsigned codes for signed bytes on disk."""
        codes = self._read(name).numpy().astype(np.int16) + (1 << (bits - 1))
        if codes.min() < 0 or codes.max() >= 1 << bits:
            raise self._wrong(f"its codes exceed {bits} bits")
        return codes.astype(np.uint8)

    def _weight(
        self, bits: int, codes: np.ndarray, scales: np.ndarray, zeros: np.ndarray | None
    ) -> QuantizedWeight:
        """Codes [out, in] that count from 0; scales and zero points [out, groups]."""
        if codes.shape != (self._out, self._in):
            raise self._wrong(f"codes {list(codes.shape)} for [{self._out}, {self._in}]")
        groups = scales.shape[-1] if scales.ndim == 2 else 0
        if not groups or len(scales) != self._out or self._in % (groups * GROUP_SIZE):
            raise self._wrong(
                f"scales {list(scales.shape)} for [{self._out}, {self._in}]: groups must be "
                f"multiples of {GROUP_SIZE}"
            )
        if not np.isfinite(scales).all():
            raise self._wrong("its scales are not finite (NaN or infinity)")
        repeats = self._in // GROUP_SIZE // groups
        scales = np.ascontiguousarray(np.repeat(scales, repeats, axis=1))
        middle = 1 << (bits - 1)
        if zeros is not None:
            zeros = self._zero_points(bits, zeros, (self._out, groups))
            zeros = None if (zeros == middle).all() else np.repeat(zeros, repeats, axis=1)
        if bits == 8:
            if zeros is not None:
                raise self._wrong("it has 8 bits and zero points; corun supports symmetric codes")
            return QuantizedWeight(8, (codes ^ 128).view(np.int8), scales)
        return QuantizedWeight(4, np.ascontiguousarray(codes), scales, zeros)

    def _zero_points(self, bits: int, zeros: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
        if zeros.shape != shape:
            raise self._wrong(f"zero points {list(zeros.shape)} for scales {list(shape)}")
        if zeros.min() < 0 or zeros.max() >= 1 << bits:
            raise self._wrong(
                f"zero points from {zeros.min()} to {zeros.max()}, beyond 0 to {(1 << bits) - 1}"
            )
        return zeros.astype(np.uint8)

    def _bits(self, num_words: int, *, fits: bool) -> int:
        """Bits of a code, if this many words hold a whole row or column."""
        bits = num_words * _WORD_BITS // self._in
        if not fits or bits not in BITS or num_words * _WORD_BITS != bits * self._in:
            raise self._wrong(f"its packed weight is not [{self._out}, {self._in}] in 4 or 8 bits")
        return bits

    def _check_order(self, name: str, group_size: int) -> None:
        """Groups must consist of neighbours: act-order is not supported."""
        if not self._has(name):
            return
        expected = torch.arange(self._in) // group_size
        if not torch.equal(self._read(name).long(), expected):
            raise self._wrong(f"its groups are not neighbours (act-order, {name})")

    def _has(self, name: str) -> bool:
        return self._files.shape(f"{self._path}.{name}") is not None

    def _read(self, name: str) -> torch.Tensor:
        if not self._has(name):
            raise self._wrong(f"no tensor {name}")
        return self._files.read(f"{self._path}.{name}")

    def _wrong(self, what: str) -> ModelError:
        return ModelError(f"the quantised linear {self._path} cannot be read: {what}")


def _fields(words: np.ndarray, bits: int) -> np.ndarray:
    """The fields of little-endian words, lowest first: int32 [a, b] -> uint8 [a, b, 32 / bits]."""
    octets = np.ascontiguousarray(words).view(np.uint8).reshape(*words.shape, 4)
    if bits == 8:
        return octets
    return np.stack((octets & 15, octets >> 4), axis=-1).reshape(*words.shape, 8)

"""Quantised checkpoints: which formats are supported, according to config.json.

Integers with scales are served as stored, if their groups are multiples of corun's, or channels,
and so are levels that the kernels have. All other formats are read in full (``full_files.py``).
Only weights count: what a checkpoint says
of activations has no effect. Settings that are unknown and would change the weights are refused by
name.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...cpu_workers.kernels.simd.layout import SMALL_GROUP_SIZE
from ...runtime.errors import ModelError
from ..linear.quantized import BITS
from .source import way_to_full_weights

_LOG = logging.getLogger(__name__)

BITSANDBYTES = "bitsandbytes"
# How GPTQ's zero points count, by the name of the form: what is added to those on disk.
_GPTQ_OFFSETS = {"gptq": 1, "gptq_v2": 0}
_AUTO_ROUND_FORMS = {
    "auto_round:auto_gptq": "gptq",
    "auto_round:gptq": "gptq",
    "auto_round:gptqmodel": "gptq_v2",
    "auto_round:auto_awq": "awq",
    "auto_round:awq": "awq",
}
_INTEGER_FORMATS = ("pack-quantized", "int-quantized")
_FLOAT_FORMATS = ("float-quantized", "naive-quantized")
_MXFP4_FORMAT = "mxfp4-pack-quantized"
_COMPRESSED_FIELDS = frozenset(
    {
        "quant_method",
        "format",
        "config_groups",
        "ignore",
        "kv_cache_scheme",
        "version",
        "quantization_status",
        "sparsity_config",
        "transform_config",
        "global_compression_ratio",
    }
)


@dataclass(frozen=True, slots=True)
class StoredQuantization:
    """The quantisation of all matrices according to config.json."""

    method: str  # as config.json calls it
    bits: frozenset[int] = frozenset()  # of its integers with scales
    layout: str = ""  # of these: "gptq", "awq" or "compressed-tensors"
    zero_offset: int = 0  # added to the zero points on disk
    in_full: bool = True  # integers are read in full; otherwise they are served as stored
    levels: str = ""  # what its other codes of 4 bits name, if the kernels have them
    block: tuple[int, int] | None = None  # rows and columns of a scale of 8-bit floats


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
    method = str(fields.get("quant_method") or BITSANDBYTES)  # early versions have no name
    read = {
        "gptq": _read_gptq,
        "awq": _read_awq,
        "auto-round": _read_auto_round,
        "compressed-tensors": _read_compressed,
        BITSANDBYTES: _read_bitsandbytes,
        "fp8": _read_fp8,
        "mxfp4": _read_mxfp4,
    }
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
    return _gptq("gptq", form, fields)


def _gptq(method: str, form: str, fields: dict[str, Any]) -> StoredQuantization:
    for name in ("adapter", "rotation"):  # computed beside the weights, or instead of them
        if fields.get(name):
            raise _refused(f"{method} with {name} {fields[name]!r}")
    bits = _checked_bits(method, fields["bits"])
    size = _checked_group_size(method, fields.get("group_size", -1))
    in_full = bool(size % SMALL_GROUP_SIZE or (bits == 8 and not fields.get("sym", True)))
    return StoredQuantization(method, frozenset({bits}), "gptq", _GPTQ_OFFSETS[form], in_full)


def _read_awq(fields: dict[str, Any]) -> StoredQuantization:
    version = str(fields.get("version", "gemm")).lower()
    bits = fields.get("bits", fields.get("w_bit"))
    if version != "gemm" or bits != 4:
        raise _refused(f"AWQ version {version!r} in {bits} bits; corun supports 'gemm' in 4")
    return _awq("awq", fields)


def _awq(method: str, fields: dict[str, Any]) -> StoredQuantization:
    size = _checked_group_size(method, fields.get("group_size", fields.get("q_group_size", -1)))
    return StoredQuantization(method, frozenset({4}), "awq", in_full=bool(size % SMALL_GROUP_SIZE))


def _read_auto_round(fields: dict[str, Any]) -> StoredQuantization:
    form = fields.get("packing_format") or "auto_round:auto_gptq"
    data_type = str(fields.get("data_type") or "int")
    if form not in _AUTO_ROUND_FORMS or data_type != "int":
        raise _refused(
            f"auto-round of {data_type!r} in the format {form!r}; corun supports 'int' in "
            f"{', '.join(_AUTO_ROUND_FORMS)}"
        )
    if _AUTO_ROUND_FORMS[form] == "awq":
        return _awq("auto-round", fields | {"bits": _checked_bits("auto-round", fields["bits"])})
    return _gptq("auto-round", _AUTO_ROUND_FORMS[form], fields)


def _read_compressed(fields: dict[str, Any]) -> StoredQuantization:
    unknown = [name for name in sorted(fields.keys() - _COMPRESSED_FIELDS) if fields[name]]
    sparsity = (fields.get("sparsity_config") or {}).get("format", "dense")
    unknown += ["sparsity_config"] if sparsity != "dense" else []
    unknown += [name for name in ("kv_cache_scheme", "transform_config") if fields.get(name)]
    if unknown:
        raise _refused(f"compressed-tensors with {', '.join(unknown)}")
    groups: dict[str, Any] = fields["config_groups"]
    bits, blocks, in_full, levels = set(), set(), False, ""
    for group in groups.values():
        form = group.get("format") or fields["format"]
        weights: dict[str, Any] = group["weights"]
        kind, strategy = weights.get("type", "int"), weights.get("strategy")
        if form in _INTEGER_FORMATS and kind == "int":
            bits.add(_checked_bits("compressed-tensors", weights["num_bits"]))
            in_full |= _has_other_groups(weights)
        elif form == _MXFP4_FORMAT:
            levels = "mxfp4"
        elif form in _FLOAT_FORMATS and kind == "float" and weights["num_bits"] == 8:
            if strategy == "block":
                blocks.add(_checked_block(weights["block_structure"]))
        else:
            raise _refused(
                f"compressed-tensors of {weights.get('num_bits')} bits of type {kind!r} in the "
                f"format {form!r}; corun supports 'int' in {', '.join(_INTEGER_FORMATS)}, "
                f"'float' of 8 in {', '.join(_FLOAT_FORMATS)}, and {_MXFP4_FORMAT}"
            )
        _warn_of_activations(group.get("input_activations") or group.get("output_activations"))
    if len(blocks) > 1:
        raise _refused("compressed-tensors with several sizes of blocks")
    return StoredQuantization(
        "compressed-tensors",
        frozenset(bits),
        "compressed-tensors",
        in_full=in_full or not bits,
        levels=levels,
        block=next(iter(blocks), None),
    )


def _has_other_groups(weights: dict[str, Any]) -> bool:
    """Whether integers of compressed-tensors cannot be served as stored."""
    strategy = weights.get("strategy")
    if strategy not in ("group", "channel", "tensor"):
        raise _refused(
            f"compressed-tensors of type 'int' by {strategy!r}; corun supports 'group', 'channel' "
            "and 'tensor'"
        )
    found = weights["num_bits"] == 8 and not weights.get("symmetric", True)
    if strategy == "group":
        size = _checked_group_size("compressed-tensors", weights["group_size"])
        found |= bool(size % SMALL_GROUP_SIZE)
    return found


def _read_bitsandbytes(fields: dict[str, Any]) -> StoredQuantization:
    """Kinds of codes, blocks and types are read from the files, per matrix."""
    if not fields.get("load_in_4bit") and not fields.get("load_in_8bit"):
        raise _refused(
            "a quantization_config that names neither a quant_method nor load_in_4bit nor load_in_8bit"
        )
    return StoredQuantization(BITSANDBYTES, levels="nf4")


def _read_fp8(fields: dict[str, Any]) -> StoredQuantization:
    for name, supported in (("fmt", "e4m3"), ("expert_dtype", "fp8")):
        if fields.get(name, supported) != supported:
            raise _refused(f"fp8 with {name} {fields[name]!r}; corun supports {supported!r}")
    _warn_of_activations(fields.get("activation_scheme"))
    block = fields.get("weight_block_size")
    return StoredQuantization("fp8", block=None if block is None else _checked_block(block))


def _read_mxfp4(_: dict[str, Any]) -> StoredQuantization:
    return StoredQuantization("mxfp4")


def _warn_of_activations(found: object) -> None:
    if found:
        _LOG.info(
            "the checkpoint asks for quantised activations, too; corun leaves activations as they "
            "are, and uses only the weights"
        )


def _checked_bits(method: str, bits: object) -> int:
    if bits not in BITS:
        raise _refused(f"{method} in {bits} bits; corun supports 8 and 4")
    assert isinstance(bits, int)
    return bits


def _checked_group_size(method: str, size: int) -> int:
    """The size of groups; a channel, -1, is a whole number of corun's groups."""
    if size != -1 and size <= 0:
        raise _refused(f"{method} in groups of {size}")
    return 0 if size == -1 else size


def _checked_block(block: Any) -> tuple[int, int]:
    rows, columns = block
    if type(rows) is not int or type(columns) is not int or min(rows, columns) < 1:
        raise _refused(f"blocks of {block}")
    return rows, columns


def _refused(what: str) -> ModelError:
    return ModelError(f"corun does not serve {what}")

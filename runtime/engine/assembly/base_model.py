"""Reads facts about a base model from its configuration, without weights."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...adapters.base_names import ServedBase
from ...config.engine import EngineConfig
from ...errors import ModelError
from ...machine.devices import load_cuda_driver

if TYPE_CHECKING:
    from ....gpu.model.source import ModelSource


_PACKED_SHARES: Mapping[str | None, float] = {None: 1.0, "int8": 0.5, "w8a8": 0.5, "int4": 0.25}
_LEAST_AHEAD_BYTES = 64 << 20
_MAX_AHEAD_SHARE = 1 / 3  # of the memory that is available: the file's pages are in memory, too


@dataclass(frozen=True, slots=True)
class BaseModel:
    """Facts about a base model, by its configuration."""

    fingerprint: str
    dtype: str
    kv_bytes_per_token: int  # over all layers
    adapter_bytes_per_rank: int  # on the device, of an adapter on all targets


def read_base_model(config: EngineConfig) -> BaseModel:
    """Read ``config.model``. Raises ``ModelError`` if it cannot be read or has an unknown form."""
    from ....gpu.model.fingerprint import model_fingerprint
    from ....gpu.model.load import resolve_dtype
    from ....gpu.model.skeleton import target_map_of
    from ....gpu.model.source import ModelSource, load_config

    assert config.model is not None
    source = ModelSource(config.model, config.revision, config.trust_remote_code)
    model = load_config(source)
    dtype = resolve_dtype(config.dtype, model)
    text = model.get_text_config()
    targets = target_map_of(source).inside
    return BaseModel(
        fingerprint=model_fingerprint(source, model),
        dtype=str(dtype).removeprefix("torch."),
        kv_bytes_per_token=dtype.itemsize * text.num_hidden_layers * _kv_width(config, text),
        adapter_bytes_per_rank=dtype.itemsize * sum(one.in_features + one.out_features for one in targets),
    )


def weights_ahead_bytes(config: EngineConfig, available_bytes: int) -> int:
    """Return how many bytes a start will at least write for corun's kernels, about.

    0 if that is unknown without a library, or little, or too much to be reserved before it is known
    to be needed. Files that cannot be read are reported later.
    """
    has_kernels = config.linear_backend in ("auto", "numba") and config.quantization in _PACKED_SHARES
    is_cpu = config.device == "cpu" or (config.device == "auto" and load_cuda_driver() is None)
    if not has_kernels or not is_cpu or config.model is None:
        return 0
    directory = Path(config.model)
    try:
        fields = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        files = [*directory.glob("model.safetensors")] or [*directory.glob("model-*-of-*.safetensors")]
        num_bytes = int(sum(file.stat().st_size for file in files) * _PACKED_SHARES[config.quantization])
        is_stored = "quantization_config" in fields  # kept or read by readers of their own
        dtype = fields.get("dtype") or fields.get("torch_dtype") if config.dtype == "auto" else config.dtype
    except (OSError, ValueError, AttributeError, TypeError):
        return 0
    if is_stored or dtype != "bfloat16" or num_bytes < _LEAST_AHEAD_BYTES:
        return 0
    return num_bytes if num_bytes <= available_bytes * _MAX_AHEAD_SHARE else 0


def optional_packages(model: str) -> tuple[str, ...]:
    """Return the packages that transformers can do without to load ``model``.

    It needs accelerate for formats of other libraries, which a configuration names.
    """
    try:
        text = (Path(model) / "config.json").read_text(encoding="utf-8")
    except (OSError, ValueError):  # of the hub; or it is reported later
        return ("scipy",)
    return ("scipy",) if "quantization_config" in text else ("scipy", "accelerate")


def read_served_base(source: "ModelSource") -> ServedBase:
    """Return a base's names, and whether it is quantised on disk. Raises ``ModelError``."""
    from transformers import PretrainedConfig

    try:
        fields, _ = PretrainedConfig.get_config_dict(source.path, **source.hub_arguments())
    except Exception as error:  # foreign code can raise anything
        raise ModelError(f"cannot read the configuration of {source.path!r}: {error}") from error
    path = Path(source.path)
    names = (source.path, str(path.resolve()) if path.is_dir() else "")
    is_quantized = bool(fields.get("quantization_config"))
    return ServedBase((*names, str(fields.get("_name_or_path") or "")), is_quantized)


def _kv_width(config: EngineConfig, text: Any) -> int:
    """Return the number of values of K and V of a token in one layer."""
    heads = getattr(text, "num_key_value_heads", None) or getattr(text, "num_attention_heads", 0)
    width = getattr(text, "head_dim", None)
    if not width and heads:
        width = text.hidden_size // text.num_attention_heads
    if not heads or not width:
        raise ModelError(f"the configuration of {config.model!r} has no size of heads")
    return int(2 * heads * width)

"""Reads facts about a base model from its configuration, without weights."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...adapters.base_names import ServedBase
from ...config.engine import EngineConfig
from ...errors import ModelError

if TYPE_CHECKING:
    from ....gpu.model.source import ModelSource


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

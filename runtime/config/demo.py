"""The demo: what is served without a model."""

from dataclasses import replace
from pathlib import Path

from ..demo import demo_adapters_path, demo_model_path
from .engine import EngineConfig


def with_demo(config: EngineConfig) -> EngineConfig:
    """Fill in the packaged model if none is given, and its adapters if none are given."""
    if config.model is not None:
        return config
    lora_dir = config.lora_dir
    if lora_dir is None and not config.lora_modules:
        lora_dir = str(demo_adapters_path())
    return replace(config, model=str(demo_model_path()), lora_dir=lora_dir)


def model_name(config: EngineConfig) -> str:
    """Return the name of the base model: its directory's name, or its hub id."""
    assert config.model is not None, "call with_demo first"
    path = Path(config.model)
    return path.resolve().name if path.is_dir() else config.model

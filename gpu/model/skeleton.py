"""Builds a model's modules without its weights, to ask what its adapters must look like."""

from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from ...runtime.adapters.target_map import TargetMap
from ...runtime.errors import ModelError
from .source import ModelSource, describe, load_config
from .targets import build_target_map


def build_skeleton(source: ModelSource, config: Any) -> PreTrainedModel:
    """Build the model on the meta device from its configuration alone; no weights are read.

    Raises ``ModelError`` naming the architecture.
    """
    try:
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(
                config, trust_remote_code=source.trust_remote_code
            )
    except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
        raise ModelError(f"cannot build {source.path!r} ({describe(config)}): {error}") from error
    return model


def target_map_of(source: ModelSource) -> TargetMap:
    """The targets of a model whose weights are not needed. Raises ``ModelError``."""
    return build_target_map(build_skeleton(source, load_config(source)))

"""The classes of the installed transformers that continue text."""

from collections.abc import Mapping
from dataclasses import dataclass

from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    PreTrainedConfig,
    PreTrainedModel,
)


@dataclass(frozen=True, slots=True)
class ModelClass:
    """A configuration class, and the model that checkpoints of its type hold."""

    config: type[PreTrainedConfig]
    model: type[PreTrainedModel]


def model_classes() -> Mapping[str, ModelClass]:
    """All causal language models and models of images and text, by model type, sorted.

    A type that is both is the model of images and text, which its checkpoints hold.
    """
    found = {}
    for mapping in (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING):
        for config in mapping.keys():  # noqa: SIM118 - the values are imported by their keys
            model = mapping[config]
            model = model[0] if isinstance(model, tuple) else model
            found[config.model_type] = ModelClass(config, model)
    return dict(sorted(found.items()))

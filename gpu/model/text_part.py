"""Removes the parts of a multi-modal model that text does not use: towers and projectors.

A model without these parts gives the same answers to text. One that needs them for text fails in
the first pass, because a removed part refuses to be called.
"""

from typing import Any

from torch import nn
from transformers import PreTrainedModel

from .targets import LeftOut, embeds_own_tokens, find_layers


def leave_out_other_parts(model: PreTrainedModel) -> tuple[str, ...]:
    """Replace every part beside the text model by a ``LeftOut``; return their paths.

    The text model is the outermost module around the decoder layers that has the text
    configuration. Embeddings and the output head are not moved.
    """
    text_path = _text_model_path(model)
    kept = (model.get_input_embeddings(), model.get_output_embeddings())
    left_out = []
    for holder_path in _holders(text_path):
        holder = model.get_submodule(holder_path)
        for name, part in list(holder.named_children()):
            path = f"{holder_path}.{name}" if holder_path else name
            is_text = f"{text_path}.".startswith(f"{path}.") or _holds_any(part, kept)
            is_text |= embeds_own_tokens(part)
            if not is_text and next(part.parameters(), None) is not None:
                setattr(holder, name, LeftOut(path, part))
                left_out.append(path)
    return tuple(left_out)


def without_other_parts(model_class: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """A class that makes models without these parts, so that their weights are not read."""

    class TextOnly(model_class):  # type: ignore[misc]
        def __init__(self, config: Any, *inputs: Any, **kwargs: Any) -> None:
            super().__init__(config, *inputs, **kwargs)
            leave_out_other_parts(self)

    # The library finds the renaming of names on disk by the name of the class and its module.
    TextOnly.__name__ = model_class.__name__
    TextOnly.__qualname__ = model_class.__qualname__
    TextOnly.__module__ = model_class.__module__
    return TextOnly


def _text_model_path(model: PreTrainedModel) -> str:
    path = find_layers(model).rpartition(".")[0]
    config_class = type(model.config.get_text_config())
    for holder_path in (*_holders(path), path):
        holder = model.get_submodule(holder_path)
        if isinstance(holder, PreTrainedModel) and type(holder.config) is config_class:
            return holder_path
    return path


def _holders(path: str) -> list[str]:
    """The paths of all modules that contain the module at ``path``, from the model ("") on."""
    names = path.split(".") if path else []
    return [".".join(names[:end]) for end in range(len(names))]


def _holds_any(part: nn.Module, modules: tuple[nn.Module | None, ...]) -> bool:
    return any(one is module for one in part.modules() for module in modules)

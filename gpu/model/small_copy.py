"""A small copy of a model: the same class with few, narrow layers, and small thresholds.

A threshold is a number in the configuration at which a model starts to compute differently: a
window, a chunk, the context of its first training, the number of keys that an indexer selects, a
step of a temperature. Candidates are not looked up by name: they are the numbers that are not the
size of any tensor.
"""

import copy
import itertools
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from .skeleton import without_initial_values

_VOCAB_SIZE = 64
_MIN_HEADS = 2
_INTERMEDIATE_SIZE = 96
_MAX_PARAMETERS = 300_000_000
_FIRST_THRESHOLD = 32  # in the copy; further ones follow in steps
_THRESHOLD_STEP = 8
_TRIED_TOKENS = 5
# Not thresholds, although they are not the size of any tensor.
_NO_THRESHOLD = re.compile(r".*_token_id|.*vocab_size.*|.*_dim|max_position_embeddings")

_Field = tuple[str, ...]  # a field of the configuration, or an entry of a dictionary in it


@dataclass(frozen=True, slots=True)
class Threshold:
    """A number that may be a threshold."""

    names: tuple[str, ...]  # of the fields that have it
    value: int
    copy_value: int  # in the copy


@dataclass(frozen=True, slots=True)
class SmallCopy:
    """A random float32 model on the CPU, and its thresholds in ascending order."""

    model: PreTrainedModel
    thresholds: tuple[Threshold, ...]


def make_small_copy(model: PreTrainedModel, min_threshold: int, limit: int) -> SmallCopy | None:
    """Make a copy if ``model`` has thresholds from ``min_threshold`` to ``limit``, both included.

    Returns None if no number can be a threshold.

    Raises ``ValueError`` with the reason if no copy of the class can be made and run.
    """
    fields = dict(_numbers(model.config.get_text_config(), min_threshold, limit))
    if not fields:
        return None
    reason = "it has too many parameters"
    for config in _small_configs(model.config):
        try:
            shapes = _shapes(type(model), config)
            if sum(math.prod(shape) for shape in shapes.values()) > _MAX_PARAMETERS:
                continue
            thresholds = _shrink_thresholds(type(model), config, shapes, fields)
            if not thresholds:
                return None
            return SmallCopy(build_random(type(model), config), thresholds)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
    raise ValueError(reason)


def shrink_thresholds(
    kind: type[PreTrainedModel], config: Any, min_threshold: int, limit: int
) -> tuple[Threshold, ...]:
    """Reduce the thresholds in ``config`` from ``min_threshold`` to ``limit``, both included.

    Returns them in ascending order. ``kind`` is the class of the models of ``config``.
    """
    fields = dict(_numbers(config.get_text_config(), min_threshold, limit))
    return _shrink_thresholds(kind, config, _shapes(kind, config), fields)


def _numbers(config: Any, minimum: int, maximum: int) -> Iterator[tuple[_Field, int]]:
    for field, value in _entries(vars(config)):
        is_number = isinstance(value, int) and not isinstance(value, bool)
        if is_number and minimum <= value <= maximum and not _NO_THRESHOLD.fullmatch(field[-1]):
            yield field, value


def _entries(mapping: Mapping[Any, Any], path: _Field = ()) -> Iterator[tuple[_Field, Any]]:
    for name, value in mapping.items():
        yield (*path, str(name)), value
        if isinstance(value, dict):
            yield from _entries(value, (*path, str(name)))


def _small_configs(config: Any) -> Iterator[Any]:
    """Configurations with fewer and narrower layers, the smallest first."""
    text = config.get_text_config()
    num_heads, width = int(text.num_attention_heads), int(text.hidden_size)
    divisors = [
        divisor
        for divisor in range(max(1, num_heads // _MIN_HEADS), 0, -1)
        if num_heads % divisor == 0 and width % divisor == 0
    ]
    num_layers = int(text.num_hidden_layers)
    for layers, divisor in itertools.product(dict.fromkeys((_prefix(text), num_layers)), divisors):
        small = copy.deepcopy(config)
        _shrink_towers(small)
        _shrink(small.get_text_config(), layers, divisor)
        yield small


def _shrink_towers(config: Any) -> None:
    """Reduce parts that are made and then removed to one layer."""
    parts = [part for part in vars(config).values() if isinstance(part, PreTrainedConfig)]
    for part in parts:
        for name in {"depth", "num_hidden_layers"} & vars(part).keys():
            if part is not config.get_text_config():
                setattr(part, name, 1)


def _prefix(text: Any) -> int:
    """The number of first layers that includes every kind of layer."""
    num_layers = int(text.num_hidden_layers)
    per_layer = [
        [repr(item) for item in value]
        for value in vars(text).values()
        if isinstance(value, list | tuple) and len(value) == num_layers
    ]
    needed = [
        max((items.index(item) + 1 for item in set(items)), default=1)
        for items in per_layer
        if len(set(items)) <= num_layers // 2  # otherwise a list of layer numbers
    ]
    return min(num_layers, max([2, *needed]))


def _shrink(text: Any, num_layers: int, divisor: int) -> None:
    """Reduce to the first layers, and divide sizes that can be divided."""
    all_layers = int(text.num_hidden_layers)
    num_heads = int(text.num_attention_heads)
    num_kv_heads = getattr(text, "num_key_value_heads", None)
    for name, value in list(vars(text).items()):
        if isinstance(value, list | tuple) and len(value) == all_layers:
            value = value[:num_layers]  # noqa: PLW2901
            setattr(text, name, value)
        if not isinstance(value, int | list | tuple) or isinstance(value, bool):
            continue
        if "vocab_size" in name and isinstance(value, int):
            setattr(text, name, min(value, _VOCAB_SIZE))
        elif name.endswith("_layers") and isinstance(value, int) and num_layers < all_layers:
            setattr(text, name, min(value, num_layers // 2))  # sharing KV, or windowed
        elif "intermediate_size" in name and isinstance(value, int):
            setattr(text, name, min(value, _INTERMEDIATE_SIZE))
        elif "intermediate_size" in name and isinstance(value, list | tuple):
            setattr(text, name, [min(int(item), _INTERMEDIATE_SIZE) for item in value])
    if (getattr(text, "pad_token_id", None) or 0) >= text.vocab_size:
        text.pad_token_id = 0
    text.num_hidden_layers = num_layers
    text.hidden_size = int(text.hidden_size) // divisor
    text.num_attention_heads = num_heads // divisor
    if num_kv_heads is not None and divisor > 1:
        text.num_key_value_heads = 1 if num_kv_heads < num_heads else num_heads // divisor


def _shrink_thresholds(
    kind: type[PreTrainedModel],
    config: Any,
    shapes: Mapping[str, tuple[int, ...]],
    fields: Mapping[_Field, int],
) -> tuple[Threshold, ...]:
    """Set all numbers of ``fields`` that are no tensor's size to small ones, in the same order."""
    names: dict[int, list[_Field]] = {}
    for field, value in fields.items():
        if _read(config, field) == value and _is_no_size(kind, config, shapes, field):
            names.setdefault(value, []).append(field)
    thresholds = []
    copy_value = _FIRST_THRESHOLD - _THRESHOLD_STEP
    for value in sorted(names):
        copy_value = min(value, copy_value + _THRESHOLD_STEP)
        for field in names[value]:
            _write(config, field, copy_value)
        thresholds.append(
            Threshold(tuple(dict.fromkeys(field[-1] for field in names[value])), value, copy_value)
        )
    return tuple(thresholds)


def _is_no_size(
    kind: type[PreTrainedModel], config: Any, shapes: Mapping[str, tuple[int, ...]], field: _Field
) -> bool:
    changed = copy.deepcopy(config)
    _write(changed, field, _FIRST_THRESHOLD)
    if _read(config, field) == _FIRST_THRESHOLD:
        _write(changed, field, _FIRST_THRESHOLD + _THRESHOLD_STEP)
    try:
        return _shapes(kind, changed) == shapes
    except Exception:  # sizes no longer match, so it is a size
        return False


def _shapes(kind: type[PreTrainedModel], config: Any) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        model = without_initial_values(lambda: kind(copy.deepcopy(config)))
    return {name: tuple(tensor.shape) for name, tensor in model.named_parameters()}


def build_random(kind: type[PreTrainedModel], config: Any) -> PreTrainedModel:
    """A float32 model on the CPU that has run once, with attention that is far from uniform."""
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.no_grad():
        torch.manual_seed(0)
        model = kind(config).float().eval()
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2:
                parameter.normal_(0.0, 1.5 * parameter.shape[-1] ** -0.5)
            elif "bias" not in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
        model.set_attn_implementation("eager")
        model(input_ids=torch.zeros(1, _TRIED_TOKENS, dtype=torch.int64), use_cache=False)
    return model


def _read(config: Any, field: _Field) -> Any:
    value = getattr(config.get_text_config(), field[0])
    for key in field[1:]:
        value = value[key]
    return value


def _write(config: Any, field: _Field, number: int) -> None:
    if len(field) == 1:
        setattr(config.get_text_config(), field[0], number)
        return
    entries = getattr(config.get_text_config(), field[0])
    for key in field[1:-1]:
        entries = entries[key]
    entries[field[-1]] = number

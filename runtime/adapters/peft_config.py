"""Reads adapter_config.json of a PEFT directory against an allow-list of fields.

New releases of PEFT add variants that change the mathematics. An adapter with an unknown field that
is not at a neutral value is therefore refused: serving it could give wrong answers without error.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from ..errors import AdapterError
from ..file_calls import FILES, Place
from .folder_files import OWN_FILES, AdapterRoots, read_file
from .lora_spec import LoraSpec, layers_pattern_regex, pattern_key_regex
from .path_regex import PathPatterns

CONFIG_NAME = "adapter_config.json"
GGUF_SUFFIX = ".gguf"
GGUF_REASON = (
    "is a GGUF adapter, which corun does not read; give the directory of the PEFT adapter that it "
    "was made from"
)

_Value = TypeVar("_Value", int, float)

_MAX_FLOAT32 = (2 - 2**-23) * 2.0**127  # adapters are scaled in float32

_MAX_CONFIG_BYTES = 4 << 20  # a configuration has a few KiB
_MAX_RANK = 2**31 - 1  # of any adapter; --max-lora-rank is lower
_MAX_TOKEN = 2**31 - 1  # of any vocabulary
_MAX_PATTERNS = 4096  # of a field; each is compiled
_MAX_CHARS_SHOWN = 200

_REQUIRED = ("peft_type", "r", "lora_alpha", "target_modules")

# Fields that ``_build_spec`` reads or ``_check_kind`` checks.
SERVED_FIELDS = frozenset(
    {
        "peft_type",
        "task_type",
        "r",
        "lora_alpha",
        "use_rslora",
        "use_dora",
        "target_modules",
        "rank_pattern",
        "alpha_pattern",
        "exclude_modules",
        "layers_to_transform",
        "layers_pattern",
        "modules_to_save",
        "trainable_token_indices",
        "ensure_weight_tying",
        "base_model_name_or_path",
        "bias",
        "init_lora_weights",
    }
)

# Fields on how the adapter was made, or used only in training.
IGNORED_FIELDS = frozenset(
    {
        "auto_mapping",
        "peft_version",
        "revision",
        "inference_mode",
        "lora_dropout",
        # Whether the base stores its weights transposed (Conv1D): A and B are the same in both
        # cases, and PEFT itself uses the class of the module.
        "fan_in_fan_out",
        "megatron_core",  # a module name, used with megatron_config only
        "qalora_group_size",  # used with use_qalora only
        "runtime_config",  # where PEFT computes, without effect on results
        # How the matrices were initialised; init_lora_weights decides whether that is served.
        "eva_config",
        "corda_config",
        "lora_ga_config",
        "loftq_config",
    }
)

# Initialisations that leave the base weights as published.
_INITS_KEEPING_BASE = ("gaussian", "eva", "orthogonal", "mica")

# Initialisations that subtract from the base weights, so that the adapter needs another base.
# PEFT can convert such an adapter when it is saved, and then writes ``init_lora_weights: true``.
_INITS_CHANGING_BASE = ("pissa", "olora", "corda", "lora_ga", "loftq")

REFUSAL_REASONS = {
    "use_qalora": "QA-LoRA is not served",
    "use_bdlora": "block-diagonal LoRA is not served",
    "lora_bias": "biases on LoRA matrices are not served",
    "target_parameters": "LoRA on raw parameters (experts) is not served",
    "alora_invocation_tokens": "activated LoRA is not served",
    "layer_replication": "replicated layers are not served",
    "megatron_config": "Megatron layers are not served",
    "arrow_config": "Arrow routing is not served",
    "velora_config": "VeLoRA is not served",
    "kasa_config": "KaSA is not served",
    "monteclora_config": "MonteCLoRA is not served",
}


PEFT_VERSION = "0.21.2"  # the newest release that corun knows

PEFT_DEFAULTS: Mapping[str, object] = {
    "alora_invocation_tokens": None,
    "alpha_pattern": {},
    "arrow_config": None,
    "auto_mapping": None,
    "base_model_name_or_path": None,
    "bias": "none",
    "corda_config": None,
    "ensure_weight_tying": False,
    "eva_config": None,
    "exclude_modules": None,
    "fan_in_fan_out": False,
    "inference_mode": False,
    "init_lora_weights": True,
    "kasa_config": None,
    "layer_replication": None,
    "layers_pattern": None,
    "layers_to_transform": None,
    "loftq_config": {},
    "lora_alpha": 8,
    "lora_bias": False,
    "lora_dropout": 0.0,
    "lora_ga_config": None,
    "megatron_config": None,
    "megatron_core": "megatron.core",
    "modules_to_save": None,
    "monteclora_config": None,
    "peft_type": "LORA",
    "qalora_group_size": 16,
    "r": 8,
    "rank_pattern": {},
    "revision": None,
    "target_modules": None,
    "target_parameters": None,
    "task_type": None,
    "trainable_token_indices": None,
    "use_bdlora": None,
    "use_dora": False,
    "use_qalora": False,
    "use_rslora": False,
    "velora_config": None,
}

# PEFT's names for the tasks of adapters; the tensors decide what is served.
TASK_TYPES = ("SEQ_CLS", "SEQ_2_SEQ_LM", "CAUSAL_LM", "TOKEN_CLS", "QUESTION_ANS", "FEATURE_EXTRACTION")


def read_peft_config(directory: Path, roots: AdapterRoots = OWN_FILES) -> LoraSpec:
    """Read and check ``directory``/adapter_config.json; ``roots``: where links may lead.

    Raises ``AdapterError`` naming the file, the field and its value.
    """
    return parse_peft_config(_read_json(directory, roots), directory / CONFIG_NAME)


def parse_peft_config(fields: Mapping[str, Any], path: Path) -> LoraSpec:
    """Check the fields of a configuration read from ``path``. Raises ``AdapterError``."""
    reader = _Fields(fields, path)
    if fields.get("peft_type") is not None:  # other kinds of adapters have other fields
        reader.one_of("peft_type", ("LORA",), "corun serves only LoRA adapters (LORA)")
    for name in _REQUIRED:
        if fields.get(name) is None:
            raise AdapterError(f"{path}: {name} is missing; a PEFT LoRA configuration has it")
    _check_kind(reader)
    _check_unknown(reader)
    spec = _build_spec(reader)
    _check_combinations(spec, reader)
    return spec


def _read_json(directory: Path, roots: AdapterRoots) -> dict[str, Any]:
    path = directory / CONFIG_NAME

    def read(_: Place) -> bytes | None:
        _check_directory(directory)
        return read_file(directory, CONFIG_NAME, _MAX_CONFIG_BYTES, roots)

    try:
        raw = FILES.call(read, str(directory))
    except FileNotFoundError:
        reason = FILES.call(lambda _: _missing(directory), str(directory))
        raise AdapterError(reason) from None
    except OSError as error:
        raise AdapterError(f"cannot read {path}: {error.strerror or error}") from error
    if raw is None:
        raise AdapterError(f"{path} is larger than {_MAX_CONFIG_BYTES} bytes")
    try:
        fields = json.loads(raw.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise AdapterError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(fields, dict):
        raise AdapterError(f"{path} is not a JSON object")
    return fields


def _check_directory(path: Path) -> None:
    """Raise ``AdapterError`` unless there is such a directory."""
    try:
        if path.is_dir():
            return
    except OSError as error:  # also of a path that is too long to show
        shown = str(path)[:_MAX_CHARS_SHOWN]
        raise AdapterError(f"cannot read the directory {shown}…: {error.strerror}") from error
    if path.suffix.lower() == GGUF_SUFFIX:
        raise AdapterError(f"{path} {GGUF_REASON}")
    if path.exists():
        raise AdapterError(f"{path} is not a directory; give the directory with the adapter's files")
    raise AdapterError(f"no such adapter directory: {path}")


def _missing(directory: Path) -> str:
    for gguf in sorted(directory.glob(f"*{GGUF_SUFFIX}")):
        return f"{gguf} {GGUF_REASON}"
    return f"{directory} holds no {CONFIG_NAME}: not a PEFT adapter"


def _check_kind(reader: "_Fields") -> None:
    # The task does not affect the matrices. Modules trained beside them are in modules_to_save and
    # among the tensors.
    reader.one_of("task_type", (None, *TASK_TYPES), "PEFT knows no such task")
    reader.one_of("bias", (None, "none"), "trained biases are not served")
    init = reader.fields.get("init_lora_weights")
    if init is None or isinstance(init, bool):
        return
    name = str(init).lower()
    if name.startswith(_INITS_CHANGING_BASE):
        raise reader.error(
            "init_lora_weights",
            "this initialisation changes the base weights, so the adapter does not fit the "
            "published base model; save it with PEFT's path_initial_model_for_weight_conversion",
        )
    if name not in _INITS_KEEPING_BASE:
        raise reader.error("init_lora_weights", "unknown initialisation")


def _check_unknown(reader: "_Fields") -> None:
    for name, value in reader.fields.items():
        if name in SERVED_FIELDS or name in IGNORED_FIELDS or _is_neutral(name, value):
            continue
        unknown = f"PEFT {PEFT_VERSION}, the newest that corun knows, has no such field"
        raise reader.error(name, REFUSAL_REASONS.get(name, unknown))


def _is_neutral(name: str, value: object) -> bool:
    """Whether a field has no effect: null, false, empty, or PEFT's default.

    Zero is not neutral.
    """
    if value is None or value is False or value in ("", [], {}):
        return True
    default = PEFT_DEFAULTS.get(name)
    return type(value) is type(default) and value == default


def _build_spec(reader: "_Fields") -> LoraSpec:
    return LoraSpec(
        r=reader.rank("r", reader.fields["r"]),
        lora_alpha=reader.number("lora_alpha", reader.fields["lora_alpha"]),
        use_rslora=reader.boolean("use_rslora"),
        use_dora=reader.boolean("use_dora"),
        trainable_token_indices=reader.tokens("trainable_token_indices"),
        ensure_weight_tying=reader.boolean("ensure_weight_tying"),
        target_modules=reader.names("target_modules"),
        rank_pattern=reader.pattern("rank_pattern", reader.rank),
        alpha_pattern=reader.pattern("alpha_pattern", reader.number),
        exclude_modules=reader.names("exclude_modules"),
        layers_to_transform=reader.layers("layers_to_transform"),
        layers_pattern=_as_tuple(reader.names("layers_pattern")),
        modules_to_save=_as_tuple(reader.names("modules_to_save")),
        base_model_name_or_path=reader.text("base_model_name_or_path"),
        patterns=reader.patterns,
    )


def _as_tuple(names: tuple[str, ...] | str) -> tuple[str, ...]:
    if isinstance(names, str):
        return (names,) if names else ()
    return names


def _check_combinations(spec: LoraSpec, reader: "_Fields") -> None:
    """Check PEFT's own rules, and that every regex is supported."""
    if not spec.target_modules:
        raise reader.error("target_modules", "no module is targeted")
    if isinstance(spec.target_modules, str):
        reader.regex("target_modules", spec.target_modules)
        for name in ("layers_to_transform", "layers_pattern"):
            if reader.fields.get(name) not in (None, []):
                raise reader.error(name, "cannot be used when target_modules is a string")
    if isinstance(spec.exclude_modules, str):
        reader.regex("exclude_modules", spec.exclude_modules)
    if spec.layers_pattern and spec.layers_to_transform is None:
        raise reader.error("layers_pattern", "needs layers_to_transform")
    _check_patterns(spec, reader)


def _check_patterns(spec: LoraSpec, reader: "_Fields") -> None:
    reader.check_number("layers_pattern", len(spec.layers_pattern))
    for name in spec.layers_pattern:
        reader.regex("layers_pattern", name)
        reader.regex("layers_pattern", layers_pattern_regex(name))
    for field, pairs in (("rank_pattern", spec.rank_pattern), ("alpha_pattern", spec.alpha_pattern)):
        for key, _ in pairs:
            reader.regex(field, key)
            reader.regex(field, pattern_key_regex(key))


class _Fields:
    """Typed access to the fields; every error names the file, the field and its value."""

    def __init__(self, fields: Mapping[str, Any], path: Path) -> None:
        self.fields = fields
        self._path = path
        self.patterns = PathPatterns()  # of the configuration

    def error(self, name: str, reason: str) -> AdapterError:
        try:
            shown = repr(self.fields.get(name))
        except RecursionError:
            shown = "a value of very many levels"
        shown = shown if len(shown) <= 200 else shown[:200] + "..."
        return AdapterError(f"{self._path}: {name}={shown} is refused: {reason}")

    def one_of(self, name: str, values: tuple[str | None, ...], reason: str) -> None:
        if self.fields.get(name) not in values:
            raise self.error(name, reason)

    def boolean(self, name: str) -> bool:
        value = self.fields.get(name)
        if not isinstance(value, bool | None):
            raise self.error(name, "must be true or false")
        return bool(value)

    def text(self, name: str) -> str | None:
        value = self.fields.get(name)
        if not isinstance(value, str | None):
            raise self.error(name, "must be a string or null")
        return value

    def rank(self, name: str, value: object) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _MAX_RANK:
            raise self.error(name, f"a rank is an integer from 1 to {_MAX_RANK}")
        return value

    def number(self, name: str, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(name, "must be a number")
        if not abs(value) <= _MAX_FLOAT32:
            raise self.error(name, f"must be a number up to {_MAX_FLOAT32:.3g}")
        return float(value)

    def names(self, name: str) -> tuple[str, ...] | str:
        value = self.fields.get(name)
        if value is None:
            return ()
        if isinstance(value, str):
            return value
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.error(name, "must be a string or a list of strings")
        return tuple(value)

    def layers(self, name: str) -> tuple[int, ...] | None:
        value = self.fields.get(name)
        if value is None:
            return None
        values = value if isinstance(value, list) else [value]
        if not all(isinstance(item, int) and not isinstance(item, bool) for item in values):
            raise self.error(name, "must be a layer index or a list of them")
        return tuple(values)

    def tokens(self, name: str) -> tuple[tuple[str, tuple[int, ...]], ...]:
        value = self.fields.get(name)
        if value is None:
            return ()
        lists = value if isinstance(value, dict) else {"": value}
        for tokens in lists.values():
            if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
                raise self.error(name, "must be a list of token ids, or an object of such lists")
            if min(tokens, default=0) < 0 or max(tokens, default=0) > _MAX_TOKEN:
                raise self.error(name, f"a token id is an integer from 0 to {_MAX_TOKEN}")
            if len(set(tokens)) < len(tokens):
                twice = next(token for token in tokens if tokens.count(token) > 1)
                raise self.error(name, f"token {twice} is listed twice")
        return tuple((key, tuple(tokens)) for key, tokens in lists.items())

    def pattern(self, name: str, check: Callable[[str, object], _Value]) -> tuple[tuple[str, _Value], ...]:
        value = self.fields.get(name)
        if value is None:
            return ()
        if not isinstance(value, dict):
            raise self.error(name, "must be an object of module patterns")
        self.check_number(name, len(value))
        return tuple((key, check(name, item)) for key, item in value.items())

    def check_number(self, name: str, num_patterns: int) -> None:
        if num_patterns > _MAX_PATTERNS:
            raise self.error(name, f"has {num_patterns} patterns, at most {_MAX_PATTERNS} are served")

    def regex(self, name: str, pattern: str) -> None:
        try:
            self.patterns.add(pattern)
        except (ValueError, TimeoutError) as error:
            shown = pattern if len(pattern) <= 200 else pattern[:200] + "..."
            raise self.error(name, f"{shown!r} is refused: {error}") from error

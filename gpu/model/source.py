"""The location of a base model, and its configuration files.

Importing this module does not import transformers: ``corun check`` mostly works without it.
"""

import logging
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...runtime.errors import ModelError

if TYPE_CHECKING:
    from transformers import GenerationConfig

_LOG = logging.getLogger(__name__)

# Parts of repository names for weights that are not full, e.g. "-unsloth-bnb-4bit".
_QUANTIZED_NAME = re.compile(
    r"([-_.](unsloth|bnb|[48]-?bits?|bitsandbytes|nf4|fp[48]|nvfp4|mxfp4|int[48]|awq|gptq|gguf|hqq"
    r"|quanto|torchao|ao|exl[23]|w[48]a(8|16)|g\d+|q[2-8](_\w+)?|dynamic|block))+$",
    re.IGNORECASE,
)
_BASE_MODEL = re.compile(r"^base_model:\s*(?:-\s*)?[\"']?([\w./-]+)", re.MULTILINE)
_MAX_CARD_CHARS = 1 << 16
_MAX_GGUF_BYTES = 1 << 16
# Types of GGUF's fields: a text, and the bytes of numbers.
_GGUF_TEXT = 8
_GGUF_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_ADAPTER_CONFIG_NAME = "adapter_config.json"


@dataclass(frozen=True, slots=True)
class ModelSource:
    """The location of a model; ``path`` is a directory or the id of a hub repository."""

    path: str
    revision: str | None = None
    trust_remote_code: bool = False

    def hub_arguments(self) -> dict[str, Any]:
        """Arguments that every ``from_pretrained`` gets."""
        return {"revision": self.revision, "trust_remote_code": self.trust_remote_code}


def load_config(source: ModelSource) -> Any:
    """Read a model's configuration. Raises ``ModelError``."""
    check_directory(source)
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(source.path, **source.hub_arguments())
    except Exception as error:  # any error of the model's code
        reason = f"cannot read the configuration of {source.path!r}: {error}"
        if not Path(source.path).exists():
            reason += "\nThere is no directory of this name either"
        if "gguf" in source.path.lower():
            reason += f"\ncorun does not read GGUF; {way_to_full_weights(source.path)}"
        raise ModelError(reason) from error


def load_generation_config(source: ModelSource, config: Any) -> "GenerationConfig":
    """Read generation_config.json, or derive it from the model's configuration.

    Raises ``ModelError`` if there is such a file and it cannot be read.
    """
    from transformers import GenerationConfig

    try:
        return GenerationConfig.from_pretrained(source.path, **source.hub_arguments())
    except Exception as error:  # also OSError if there is no such file
        file = Path(source.path) / "generation_config.json"
        if file.exists() or not isinstance(error, OSError):
            raise ModelError(f"cannot read generation_config.json of {source.path!r}: {error}") from error
        return GenerationConfig.from_model_config(config)


def warn_of_adapter(source: ModelSource) -> None:
    """Log a warning if there is an adapter beside the base's weights: it is not applied."""
    if _has_adapter(source):
        _LOG.warning(
            "%s also holds an adapter (adapter_config.json). The base is served without it; "
            "--lora-modules NAME=%s serves the adapter under its own name",
            source.path,
            source.path,
        )


def _has_adapter(source: ModelSource) -> bool:
    directory = Path(source.path)
    if directory.is_dir():
        return (directory / _ADAPTER_CONFIG_NAME).is_file()
    from transformers.utils import find_adapter_config_file

    return find_adapter_config_file(source.path, revision=source.revision) is not None


def way_to_full_weights(path: str) -> str:
    """Advice for an unsupported checkpoint: which model to serve, and how.

    The model is named by the checkpoint's card (README.md), by the file if it is GGUF, or by its
    own name without endings of quantisation.
    """
    name = Path(path).name.removesuffix(".gguf")
    of_gguf = _gguf_fields(Path(path)).get("general.base_model.0.name")
    original = _base_of_card(Path(path)) or of_gguf or _QUANTIZED_NAME.sub("", name)
    named = "it was made from" if original == name else f"it was made from, {original}"
    return (
        f"serve the full model in safetensors that {named}; --quantization int4 takes about as little memory"
    )


def _base_of_card(path: Path) -> str | None:
    """The base model that README.md states for the model at ``path``, if any."""
    card = (path if path.is_dir() else path.parent) / "README.md"
    try:
        with card.open(encoding="utf-8", errors="replace") as file:
            _, *parts = file.read(_MAX_CARD_CHARS).split("---\n", 2)
    except OSError:
        return None
    found = _BASE_MODEL.search(parts[0]) if len(parts) == 2 else None
    return None if found is None else found[1]


def describe(config: Any) -> str:
    """Name the architecture for a message, such as "llama, LlamaForCausalLM"."""
    names = getattr(config, "architectures", None) or ()
    return ", ".join([str(getattr(config, "model_type", "unknown")), *names])


def check_directory(source: ModelSource) -> None:
    """Refuse a directory that is not a model, and a missing path, as these are no hub ids.

    Raises ``ModelError``.
    """
    path = Path(source.path)
    looks_local = path.is_absolute() or source.path.startswith((".", "~")) or "\\" in source.path
    if path.is_dir():
        _check_gguf(path)
        if not (path / "config.json").is_file():
            hint = ""
            if (path / _ADAPTER_CONFIG_NAME).is_file():
                hint = (
                    "; it holds an adapter: name its base model as --model, and the adapter as "
                    f"--lora-modules NAME={source.path}"
                )
            raise ModelError(f"{source.path!r} has no config.json, so it is not a model directory{hint}")
    elif path.is_file():
        _check_gguf(path)
        raise ModelError(f"{source.path!r} is a file; a model is a directory with config.json")
    elif looks_local or source.path.count("/") > 1:
        raise ModelError(f"no such model directory: {source.path!r}")


def _check_gguf(path: Path) -> None:
    """Refuse a GGUF file, and a directory with weights only in such files."""
    found = [path] if path.is_file() else [*path.iterdir()]
    of_gguf = sorted(one.name for one in found if one.suffix.lower() == ".gguf")
    if of_gguf and not any(one.suffix == ".safetensors" for one in found):
        file = path if path.is_file() else path / of_gguf[0]
        fields = _gguf_fields(file)
        facts = [fields.get(f"general.{name}") for name in ("architecture", "name")]
        described = ", ".join(fact for fact in facts if fact)
        raise ModelError(
            f"{str(path)!r} {'is' if path.is_file() else f'holds {of_gguf[0]},'} a GGUF file"
            f"{f' ({described})' if described else ''}, which corun does not read; "
            f"{way_to_full_weights(str(file))}"
        )


def is_gguf_model(path: Path) -> bool:
    """Whether a file says that it is a GGUF model, and not an adapter."""
    return _gguf_fields(path).get("general.type") == "model"


def _gguf_fields(path: Path) -> dict[str, str]:
    """The texts among the first fields of a GGUF file, up to an array; {} if it is not valid."""
    found: dict[str, str] = {}
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_GGUF_BYTES)
        magic, _, _, count = struct.unpack_from("<4sIQQ", data)
        place = 24 if magic == b"GGUF" else len(data)
        for _ in range(count):
            key, place = _gguf_text(data, place)
            (kind,) = struct.unpack_from("<I", data, place)
            place += 4
            if kind == _GGUF_TEXT:
                found[key], place = _gguf_text(data, place)
            else:
                place += _GGUF_SIZES[kind]
    except (OSError, struct.error, ValueError, KeyError):
        pass
    return found


def _gguf_text(data: bytes, place: int) -> tuple[str, int]:
    (length,) = struct.unpack_from("<Q", data, place)
    end = place + 8 + length
    if end > len(data):
        raise ValueError("the text is cut")
    return data[place + 8 : end].decode(), end

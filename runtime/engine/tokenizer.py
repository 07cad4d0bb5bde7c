"""The model's tokenizer as transformers loads it, and its data for front ends without transformers.

A front end with the engine in another process needs neither transformers nor torch for a tokenizer
that is implemented entirely by its Rust backend. Knows nothing of requests.
"""

import json
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..adapters.conventions import PROCESSOR_TEMPLATE_NAME
from ..adapters.vocabulary import BaseTokens
from ..errors import ModelError
from .messages import TokenizerSpec

_PROBE_TEXT = " The 3 cafés,\n\tmore…"
# transformers replaces its module while it is imported: a second thread that waits for the import
# would get the old module, which has no names.
_IMPORT_LOCK = threading.Lock()


def load_tokenizer(path: str, *, revision: str | None = None, trust_remote_code: bool = False) -> Any:
    """Load transformers' tokenizer from a directory or hub id.

    A tokenizer without a chat template gets that of the model's processor, if any. Raises
    ``ModelError`` if there is no tokenizer.
    """
    try:
        hf = _import_auto_tokenizer().from_pretrained(
            path, revision=revision, trust_remote_code=trust_remote_code
        )
    # Tokenizer files fail in many ways (JSON, missing packages, Rust errors).
    except Exception as error:
        raise ModelError(f"cannot load a tokenizer from {path!r}: {error}") from error
    if hf.chat_template is None:
        hf.chat_template = _processor_template(path, revision)
    return hf


def plain_backend(hf: Any) -> Any:
    """Return the Rust tokenizer behind transformers' ``hf`` if it gives the same tokens.

    Called directly it lets other threads run, and never changes shared state. Returns None if the
    tokens differ.
    """
    if not getattr(hf, "is_fast", False):
        return None
    backend = hf.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    for add_special_tokens in (True, False):
        expected = list(hf.encode(_PROBE_TEXT, add_special_tokens=add_special_tokens))
        encoding = backend.encode_batch_fast([_PROBE_TEXT], add_special_tokens=add_special_tokens)
        if list(encoding[0].ids) != expected:
            return None
    return backend


def spec_of(hf: Any) -> TokenizerSpec | None:
    """Return the data to make ``hf`` without transformers; None if that is not possible."""
    backend = plain_backend(hf)
    # The data does not include whether special tokens in texts are split.
    if backend is None or backend.encode_special_tokens:
        return None
    text = _backend_json(hf)
    if text is None:
        return None
    templates = hf.chat_template, response_template_of(hf)
    return TokenizerSpec(text, dict(hf.special_tokens_map), *templates)


def response_template_of(hf: Any) -> str | None:
    """Return the JSON of the response template of transformers' ``hf``, if it has one."""
    found = getattr(hf, "response_template", None)
    return None if found is None else json.dumps(found)


@dataclass(frozen=True, slots=True)
class ModelTokenizer:
    """A model's tokenizer, as the parts of an engine need it."""

    tokens: BaseTokens
    spec: TokenizerSpec | None  # to make it without transformers; None = not possible
    backend: str | None  # JSON of its Rust tokenizer; None = it has none


def read_tokenizer(
    path: str, num_embeddings: int, *, revision: str | None = None, trust_remote_code: bool = False
) -> ModelTokenizer:
    """Read a model's tokenizer. Raises ``ModelError`` if there is none.

    ``num_embeddings``: the model's.
    """
    hf = load_tokenizer(path, revision=revision, trust_remote_code=trust_remote_code)
    added = frozenset(str(token) for token in hf.added_tokens_decoder.values())
    tokens = BaseTokens(dict(hf.get_vocab()), added, hf.eos_token_id, num_embeddings)
    # A tokenizer's own code is not part of the data.
    spec = None if trust_remote_code else spec_of(hf)
    return ModelTokenizer(tokens, spec, _backend_json(hf) if spec is None else spec.backend)


def _backend_json(hf: Any) -> str | None:
    if not getattr(hf, "is_fast", False):
        return None
    try:
        return str(hf.backend_tokenizer.to_str())
    except Exception:  # parts written in Python cannot be serialised
        return None


def _processor_template(path: str, revision: str | None) -> str | None:
    """Return the chat template that older releases of transformers wrote for a processor."""
    from transformers.utils import cached_file

    try:
        file = cached_file(path, PROCESSOR_TEMPLATE_NAME, revision=revision)
    except OSError:  # there is none
        return None
    try:
        template = json.loads(Path(file).read_text(encoding="utf-8"))["chat_template"]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ModelError(f"cannot read {PROCESSOR_TEMPLATE_NAME} of {path!r}: {error!r}") from error
    if not isinstance(template, str):
        raise ModelError(f"chat_template in {PROCESSOR_TEMPLATE_NAME} of {path!r} is not a string")
    return template


def _import_auto_tokenizer() -> Any:
    with _IMPORT_LOCK:
        from transformers import AutoTokenizer

        return AutoTokenizer

"""What an adapter brings for conversations: a chat template, and more tokens that end an answer.

Many adapters are trained on base models that have no template, and theirs lies in their folder. It
is used as the model's own is, sandbox and limits included, if the adapter's tokens are the base's:
another vocabulary would make other tokens of the same text.
"""

import asyncio
import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..adapters.peft_config import (
    CONVENTION_NAMES,
    GENERATION_CONFIG_NAME,
    TEMPLATE_NAME,
    TOKENIZER_CONFIG_NAME,
    TOKENIZER_NAME,
)
from ..errors import RequestError
from .chat_template import RENDER_ERRORS, ChatTemplate
from .codec import Codec

_LOG = logging.getLogger(__name__)

_LOOK_EVERY_S = 1.0  # whether files have changed
_MAX_KNOWN = 4096  # folders
_MAX_FILE_BYTES = 64 << 20  # tokenizers of large vocabularies have some

_Stamps = tuple[tuple[int, int, int] | None, ...]


@dataclass(frozen=True, slots=True)
class Conventions:
    """Of one adapter; None and () = those of the base."""

    template: ChatTemplate | None = None
    eos_token_ids: tuple[int, ...] = ()  # beside the base's

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **template_arguments: Any,
    ) -> str:
        """See ``Tokenizer.apply_chat_template``."""
        assert self.template is not None, "it has none"
        try:
            return self.template.render(
                messages,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **template_arguments,
            )
        except RENDER_ERRORS as error:
            raise RequestError(
                f"the adapter's chat template refuses the messages: {error}", param="messages"
            ) from error


_NONE = Conventions()


@dataclass(frozen=True, slots=True)
class _Known:
    stamps: _Stamps
    conventions: Conventions
    looked_s: float


class AdapterConventions:
    """Reads and keeps them, by folder. On one event loop; files are read in threads."""

    def __init__(self, codec: Codec, *, is_on: bool, look_every_s: float = _LOOK_EVERY_S) -> None:
        """``codec``: the base's. ``is_on``: False = all have those of the base."""
        self._look_every_s = look_every_s
        self._codec = codec
        self._is_on = is_on
        self._vocabulary: Mapping[str, int] | None = None
        self._known: dict[str, _Known] = {}

    async def of(self, path: str | None) -> Conventions:
        """Return those of the adapter at ``path``; None = the base's."""
        if path is None or not self._is_on:
            return _NONE
        known = self._known.get(path)
        if known is None or time.monotonic() > known.looked_s + self._look_every_s:
            known = await asyncio.to_thread(self._look, Path(path), known)
            if path not in self._known and len(self._known) >= _MAX_KNOWN:
                del self._known[next(iter(self._known))]
            self._known[path] = known
        return known.conventions

    def _look(self, folder: Path, known: _Known | None) -> _Known:
        stamps = tuple(_stamp(folder / name) for name in CONVENTION_NAMES)
        if known is not None and known.stamps == stamps:
            return _Known(stamps, known.conventions, time.monotonic())
        try:
            conventions = self._read(folder)
        except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
            _LOG.warning(
                "%s: its chat template and end tokens are not used, because its files cannot be "
                "read: %s: %s", folder, type(error).__name__, error,
            )  # fmt: skip
            conventions = _NONE
        return _Known(stamps, conventions, time.monotonic())

    def _read(self, folder: Path) -> Conventions:
        config = _read_json(folder / TOKENIZER_CONFIG_NAME)
        source = _template_source(folder, config)
        eos_token_ids = _eos_token_ids(_read_json(folder / GENERATION_CONFIG_NAME))
        if source is None and not eos_token_ids:
            return _NONE
        reason = self._other_tokens(config, _read_json(folder / TOKENIZER_NAME))
        if reason is not None:
            _LOG.warning("%s: its chat template and end tokens are not used: %s", folder, reason)
            return _NONE
        base = self._codec.chat_template
        if source is not None and base is None:
            _LOG.warning("%s: its chat template is not used: the base writes its own", folder)
            source = None
        template = None if source is None or base is None else base.with_source(source)
        return Conventions(template, eos_token_ids)

    def _other_tokens(self, config: Mapping[str, Any], tokenizer: Mapping[str, Any]) -> str | None:
        """Why its tokens are not those of the base; None if they are, as far as it says."""
        if self._vocabulary is None:
            self._vocabulary = self._codec.vocabulary()
        base = self._vocabulary
        if tokenizer and _vocabulary_of(tokenizer) != base:
            return "its vocabulary is another"
        for token_id, token in config.get("added_tokens_decoder", {}).items():
            if base.get(token["content"]) != int(token_id):
                return f"token {token_id} is {token['content']!r} there"
        return None


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


def _read_json(path: Path) -> dict[str, Any]:
    """Return what is in a file; nothing if it is not there."""
    try:
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise ValueError(f"{path.name} has more than {_MAX_FILE_BYTES} bytes")
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    if not isinstance(found, dict):
        raise TypeError(f"{path.name} is no JSON object")
    return found


def _template_source(folder: Path, config: Mapping[str, Any]) -> str | dict[str, str] | None:
    """Return what transformers takes: a file of its own, or else a field of the configuration."""
    try:
        return (folder / TEMPLATE_NAME).read_text(encoding="utf-8")
    except FileNotFoundError:
        pass
    source = config.get("chat_template")
    if isinstance(source, list):
        return {str(one["name"]): str(one["template"]) for one in source}
    return None if source is None else str(source)


def _eos_token_ids(config: Mapping[str, Any]) -> tuple[int, ...]:
    found = config.get("eos_token_id")
    if found is None:
        return ()
    return tuple(int(one) for one in (found if isinstance(found, list) else [found]))


def _vocabulary_of(tokenizer: Mapping[str, Any]) -> dict[str, int]:
    """Return the tokens of a ``tokenizer.json``, and their ids."""
    vocabulary = tokenizer["model"]["vocab"]
    if isinstance(vocabulary, list):  # of unigram models, with scores
        vocabulary = {one[0]: token_id for token_id, one in enumerate(vocabulary)}
    added = {one["content"]: one["id"] for one in tokenizer.get("added_tokens", ())}
    return dict(vocabulary) | added

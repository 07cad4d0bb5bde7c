"""Reads the files of an adapter's conventions, each once and up to a size limit.

If a file cannot be read, the adapter's conversations are refused, as the adapter may have been
trained with another template; requests with a prompt are served.
"""

import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from ..file_calls import FILES, Place, SilentError
from .content import FileStamp
from .conventions import (
    ADDED_TOKENS_NAME,
    GENERATION_CONFIG_NAME,
    MAX_TEMPLATE_BYTES,
    PROCESSOR_TEMPLATE_NAME,
    SPECIAL_TOKENS_NAME,
    TEMPLATE_NAME,
    TOKENIZER_CONFIG_NAME,
    TOKENIZER_NAME,
    AdapterConventions,
    ConventionContents,
    conventions_of,
    refused,
    with_vocabulary,
)
from .folder_files import OWN_FILES, AdapterRoots, NotRegularError, OpenFolder
from .sources import why_unknown
from .vocabulary import AddedToken, BaseTokens, TokenDifferences, compare

_LOG = logging.getLogger(__name__)

_MAX_JSON_BYTES = 16 << 20
_MAX_TOKENIZER_BYTES = 64 << 20  # large vocabularies need half of it
_MAX_KNOWN = 64  # tokenizers; adapters of one trainer share one
# Resolution of a file system's clock: two writes within it can have the same time.
_CLOCK_STEP_NS = 1_000_000_000

# Returns the content of a file with this name and at most so many bytes; None if there is none.
_ReadFile = Callable[[str, int], bytes | None]


class _Model(msgspec.Struct):
    vocab: dict[str, int] | list[tuple[str, float]]  # of unigram models with scores


class _TokenizerFile(msgspec.Struct):
    """The fields of a ``tokenizer.json`` that are read."""

    model: _Model
    added_tokens: list[AddedToken] = []


class ConventionReader:
    """Reads folders of adapters over one base. Belongs to one thread at a time."""

    def __init__(self, base: BaseTokens, roots: AdapterRoots = OWN_FILES) -> None:
        """``roots``: where links in the folders may lead."""
        self._base = base
        self._roots = roots
        self._known: dict[bytes, TokenDifferences] = {}  # by digest of the file

    def read(self, folder: Path, vocab_size: int | None = None) -> AdapterConventions:
        """Return the conventions of the adapter in ``folder``; errors are logged.

        ``vocab_size``: tokens that its weights have; None = as many as the base.
        Raises ``SilentError`` if the file system does not answer.
        """
        try:
            contents = FILES.call(partial(self._read_contents, folder), str(folder))
            base = self._base if vocab_size is None else self._base.with_embeddings(vocab_size)
            found, notes = conventions_of(*contents, base)
        except ValueError as error:
            _LOG.warning(
                "%s: %s; requests with messages are refused, requests with a prompt are served", folder, error
            )
            return with_vocabulary(refused(str(error)), vocab_size)
        for note in notes:
            _LOG.warning("%s: %s", folder, note)
        return with_vocabulary(found, vocab_size)

    def _read_contents(self, folder: Path, place: Place) -> tuple[ConventionContents, TokenDifferences]:
        try:
            with OpenFolder(folder, self._roots) as opened:
                return self._contents(partial(_read, opened, place))
        except FileNotFoundError:
            return self._contents(lambda name, max_bytes: None)
        except SilentError:  # not a fault of the folder
            raise
        except OSError as error:
            raise ValueError(f"its folder cannot be read: {error.strerror or error}") from error

    def _contents(self, read: _ReadFile) -> tuple[ConventionContents, TokenDifferences]:
        contents = ConventionContents(
            template=_read_template(read),
            processor_template=_read_json(read, PROCESSOR_TEMPLATE_NAME),
            tokenizer_config=_read_json(read, TOKENIZER_CONFIG_NAME),
            special_tokens_map=_read_json(read, SPECIAL_TOKENS_NAME),
            added_tokens=_read_json(read, ADDED_TOKENS_NAME),
            generation_config=_read_json(read, GENERATION_CONFIG_NAME),
        )
        return contents, self._compare(read(TOKENIZER_NAME, _MAX_TOKENIZER_BYTES))

    def _compare(self, raw: bytes | None) -> TokenDifferences:
        """Compare the tokenizer in a file, if there is one, with the base's."""
        if raw is None:
            return TokenDifferences()
        digest = hashlib.sha256(raw).digest()
        found = self._known.get(digest)
        if found is None:
            if len(self._known) >= _MAX_KNOWN:
                del self._known[next(iter(self._known))]
            found = self._known[digest] = self._compare_file(raw)
        return found

    def _compare_file(self, raw: bytes) -> TokenDifferences:
        try:
            file = msgspec.json.decode(raw, type=_TokenizerFile)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{TOKENIZER_NAME} is not a tokenizer: {error}") from error
        words = file.model.vocab
        if isinstance(words, list):
            words = {word: token_id for token_id, (word, _) in enumerate(words)}
        # A vocabulary may list its added tokens, which are not words.
        return compare(words, file.added_tokens, self._base)


def _read_template(read: _ReadFile) -> str | None:
    raw = read(TEMPLATE_NAME, MAX_TEMPLATE_BYTES)
    if raw is None:
        return None
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{TEMPLATE_NAME} is not valid UTF-8: {error.reason} at byte {error.start}"
        ) from error
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _read_json(read: _ReadFile, name: str) -> dict[str, Any]:
    """Return the object in a file; empty if there is no file."""
    raw = read(name, _MAX_JSON_BYTES)
    if raw is None:
        return {}
    try:
        found = json.loads(raw)
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is not valid UTF-8: {error.reason} at byte {error.start}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name} is not valid JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{name} is not a JSON object")
    return found


def _read(folder: OpenFolder, place: Place, name: str, max_bytes: int) -> bytes | None:
    """Return the content of a file; None if there is no file. Raises ``ValueError``."""
    try:
        raw = folder.read(name, max_bytes, place)
    except FileNotFoundError:
        return None
    except SilentError:  # not a fault of the file
        raise
    except NotRegularError:
        raise ValueError(f"{name} is not a file") from None
    except OSError as error:
        raise ValueError(f"{name} cannot be read: {error.strerror or error}") from error
    if raw is None:
        raise ValueError(f"{name} has more than {max_bytes} bytes")
    return raw


def stamps_of(folder: Path, names: Sequence[str]) -> tuple[FileStamp | None, ...]:
    """Return stamps that distinguish the files from earlier and later ones; None = no file.

    Raises ``OSError`` if a file cannot be examined.
    """
    return FILES.call(lambda _: tuple(_stamp_of(os.path.join(folder, name)) for name in names), str(folder))


def settled_stamps_of(folder: Path, names: Sequence[str]) -> tuple[FileStamp, ...] | None:
    """Return the stamps if all files exist and were not written just now; else None.

    Files with these stamps have the same contents: any later write changes the stamp.
    """
    stamps = [stamp for stamp in stamps_of(folder, names) if stamp is not None]
    newest_ns = time.time_ns() - _CLOCK_STEP_NS
    is_settled = len(stamps) == len(names) and all(stamp[-1] < newest_ns for stamp in stamps)
    return tuple(stamps) if is_settled else None


def _stamp_of(path: str) -> FileStamp | None:
    try:
        status = os.stat(path)
    except OSError as error:
        if why_unknown(error) is not None:
            raise
        return None
    return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)

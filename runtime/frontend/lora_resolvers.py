"""Finds unregistered adapters that requests name: ``--lora-resolver``.

The interface is vLLM's: a resolver written for vLLM needs only a few lines here.
"""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Protocol

from ..adapters.allowed_dirs import resolve_allowed
from ..adapters.checkpoint import WEIGHTS_NAME
from ..adapters.conventions import TEMPLATE_NAME
from ..adapters.peft_config import CONFIG_NAME
from ..adapters.sources import is_adapter
from ..config.notations import parse_lora_resolver
from ..errors import AdapterError, ConfigError, RequestError, UnknownModelError
from ..file_calls import FILES
from .outputs import LoRARequest

# Only the adapter and its small files: the repository may hold a whole model.
_HUB_FILES = (WEIGHTS_NAME, TEMPLATE_NAME, "*.json")
_MAX_FETCHES = 4  # at a time
_ASK_TIMEOUT_S = 5.0  # for each request that checks whether the hub has a repository


class LoraResolver(Protocol):
    """Finds adapters by name."""

    async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest | None:
        """Return the adapter of this name, in a directory of this machine; None = not found.

        Raises ``UnknownModelError`` with the reason if the search fails, ``AdapterError`` if the
        adapter exists but cannot be fetched.
        """
        ...


class DirectoryResolver:
    """Adapters are subdirectories of one directory, by name; links must not lead out of it."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest | None:
        path = self._directory / lora_name
        try:
            return await FILES.answer(lambda _: self._find(lora_name, path), str(path))
        except OSError as error:
            raise UnknownModelError(
                f"cannot look for adapter {lora_name!r}: its directory cannot be read "
                f"({error.strerror})", param="lora_request",
            ) from error  # fmt: skip

    def _find(self, name: str, path: Path) -> LoRARequest | None:
        if not is_adapter(path):
            return None
        try:
            found = resolve_allowed(str(path), [str(self._directory)])
        except RequestError:  # reveals nothing of files elsewhere
            return None
        return LoRARequest(name, 0, found)


class HubResolver:
    """Adapters are repositories of Hugging Face's hub: ``owner/name``, or ``owner/name@revision``.

    Only safetensors and JSON files and chat templates are fetched, into the hub's cache.
    """

    def __init__(self, allowed: str | None = None) -> None:
        """``allowed``: the only owner or repository to fetch from; None = all."""
        self._allowed = allowed
        # Own threads: a hub that hangs must not occupy the shared ones.
        self._threads = ThreadPoolExecutor(_MAX_FETCHES, thread_name_prefix="corun-hub")

    async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest | None:
        repository, at, revision = lora_name.partition("@")
        is_name = repository.count("/") == 1 and bool(at) == bool(revision)
        if not is_name or not self._is_allowed(repository):
            return None
        fetch = partial(self._fetch, lora_name, repository, revision or "main")
        return await asyncio.get_running_loop().run_in_executor(self._threads, fetch)

    def _fetch(self, name: str, repository: str, revision: str) -> LoRARequest | None:
        from huggingface_hub.errors import (
            GatedRepoError,
            HFValidationError,
            RepositoryNotFoundError,
            RevisionNotFoundError,
        )

        try:
            path = _download(repository, revision)
        except GatedRepoError as error:
            raise AdapterError(
                f"adapter {name!r} is in a gated repository of the hub; set HF_TOKEN to the "
                "token of an account with access"
            ) from error
        except (RepositoryNotFoundError, RevisionNotFoundError, HFValidationError):
            return None
        # Unreachable, overloaded, offline or a full disk: each has errors of its own.
        except Exception as error:
            path = _cached(repository, revision)
            if path is None:
                reason = str(error).strip().partition("\n")[0] or type(error).__name__
                raise UnknownModelError(
                    f"no model or adapter is named {name!r}, and it cannot be fetched from "
                    f"the hub now: {reason}",
                    param="lora_request",
                ) from error
        return None if path is None else LoRARequest(name, 0, str(path))

    def _is_allowed(self, repository: str) -> bool:
        owner = repository.partition("/")[0]
        return self._allowed in (None, owner, repository)


def _download(repository: str, revision: str) -> Path | None:
    """Return the directory of the adapter's files in the hub's cache; None = not an adapter.

    Does not use ``snapshot_download``, which waits forever for a hub that does not answer.
    """
    from huggingface_hub import HfApi, hf_hub_download

    info = HfApi().model_info(repository, revision=revision, timeout=_ASK_TIMEOUT_S)
    files = [file.rfilename for file in info.siblings or () if "/" not in file.rfilename]
    if CONFIG_NAME not in files:
        return None
    wanted = [name for name in files if any(fnmatch(name, kind) for kind in _HUB_FILES)]
    paths = {name: hf_hub_download(repository, name, revision=revision) for name in wanted}
    return Path(paths[CONFIG_NAME]).parent


def _cached(repository: str, revision: str) -> Path | None:
    """Return the directory of the adapter's files if they were fetched before."""
    from huggingface_hub import try_to_load_from_cache

    found = [
        try_to_load_from_cache(repository, name, revision=revision)
        for name in (CONFIG_NAME, WEIGHTS_NAME)
    ]
    return Path(str(found[0])).parent if all(isinstance(one, str) for one in found) else None


def make_resolver(text: str) -> LoraResolver:
    """Make the resolver that ``--lora-resolver`` names.

    Raises ``ConfigError`` if its directory does not exist.
    """
    kind, argument = parse_lora_resolver(text)
    if kind == "hub":
        return HubResolver(argument)
    directory = Path(str(argument))
    if not directory.is_dir():
        raise ConfigError(f"--lora-resolver directory:{directory}: there is no such directory")
    return DirectoryResolver(directory)

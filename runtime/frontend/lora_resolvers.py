"""Finds unregistered adapters that requests name: ``--lora-resolver``.

The interface is vLLM's: a resolver written for vLLM needs only a few lines here.
"""

import asyncio
import os
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
from ..file_calls import FILES, is_directory
from ..limits import HubLimits
from .hub_budget import HubBudget
from .outputs import LoRARequest

# Only the adapter and its small files: the repository may hold a whole model.
_HUB_FILES = (WEIGHTS_NAME, TEMPLATE_NAME, "*.json")
_MAX_FILES = 64  # of an adapter; it has about ten
_MAX_FETCHES = 4  # at a time
_MAX_LOOKS = 8  # into one directory at a time; on a dead mount each of them occupies a thread
_ASK_TIMEOUT_S = 5.0  # for each request that checks whether the hub has a repository


class LoraResolver(Protocol):
    """Finds adapters by name."""

    async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest | None:
        """Return the adapter of this name, in a directory of this machine; None = not found.

        Raises ``UnknownModelError`` with the reason if the search fails, ``AdapterError`` if the
        adapter exists but cannot be fetched.
        """


class DirectoryResolver:
    """Adapters are subdirectories of one directory, by name; links must not lead out of it."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._looks = asyncio.Semaphore(_MAX_LOOKS)

    async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest | None:
        path = self._directory / lora_name
        try:
            async with self._looks:
                # If nothing in it answers, its own path counts as silent, not that of each name.
                root = str(self._directory)
                await FILES.answer(lambda _: os.path.exists(root), root)
                return await FILES.answer(lambda _: self._find(lora_name, path), str(path))
        except OSError as error:
            raise UnknownModelError(
                f"cannot look for adapter {lora_name!r}: its directory cannot be read ({error.strerror})",
                param="lora_request",
            ) from error

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

    def __init__(self, allowed: str | None = None, budget: HubBudget | None = None) -> None:
        """``allowed``: the only owner or repository to fetch from; None = all.

        ``budget``: None = one of its own, with the default limits.
        """
        self._allowed = allowed
        self._budget = budget or HubBudget(HubLimits(), lambda name: True)
        # Own threads: a hub that hangs must not occupy the shared ones.
        self._threads = ThreadPoolExecutor(_MAX_FETCHES, thread_name_prefix="corun-hub")

    async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest | None:
        repository, revision = _split(lora_name)
        if repository is None or not self._is_allowed(repository):
            return None
        fetch = partial(self._fetch, lora_name, repository, revision)
        return await asyncio.get_running_loop().run_in_executor(self._threads, fetch)

    def needs_admin(self, name: str) -> bool:
        """Whether only an administrator may have ``name`` fetched, with the server's own token."""
        return self._allowed is None and _split(name)[0] is not None

    def _fetch(self, name: str, repository: str, revision: str) -> LoRARequest | None:
        from huggingface_hub.errors import (
            GatedRepoError,
            HFValidationError,
            RepositoryNotFoundError,
            RevisionNotFoundError,
        )

        try:
            path = _download(name, repository, revision, self._budget)
        except AdapterError:
            raise
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
            with self._budget.reserved(name, 0, path):
                pass
        return None if path is None else LoRARequest(name, 0, str(path))

    def _is_allowed(self, repository: str) -> bool:
        owner = repository.partition("/")[0]
        return self._allowed in (None, owner, repository)


def _split(name: str) -> tuple[str | None, str]:
    """Return repository and revision; no repository = not a name on the hub."""
    repository, at, revision = name.partition("@")
    is_name = repository.count("/") == 1 and bool(at) == bool(revision)
    return repository if is_name else None, revision or "main"


def _download(name: str, repository: str, revision: str, budget: HubBudget) -> Path | None:
    """Return the directory of the adapter's files in the hub's cache; None = not an adapter.

    The files are those of one commit, whose sizes are known before: a branch may move meanwhile.
    Does not use ``snapshot_download``, which waits forever for a hub that does not answer.
    """
    from huggingface_hub import HfApi, hf_hub_download
    from huggingface_hub.constants import HF_HUB_CACHE

    info = HfApi().model_info(repository, revision=revision, timeout=_ASK_TIMEOUT_S, files_metadata=True)
    sizes = {
        file.rfilename: file.size
        for file in info.siblings or ()
        if "/" not in file.rfilename and any(fnmatch(file.rfilename, kind) for kind in _HUB_FILES)
    }
    commit = info.sha
    if CONFIG_NAME not in sizes or commit is None:
        return None
    if len(sizes) > _MAX_FILES:
        raise AdapterError(
            f"adapter {name!r} has {len(sizes)} files on the hub, at most {_MAX_FILES} are fetched"
        )
    missing = [file for file in sizes if not _is_cached(repository, file, commit)]
    budget.check_size(name, sum(_known(name, file, size) for file, size in sizes.items()))
    num_bytes = sum(_known(name, file, sizes[file]) for file in missing)
    with budget.reserved(name, num_bytes, Path(HF_HUB_CACHE)):
        path = Path(hf_hub_download(repository, CONFIG_NAME, revision=commit))
        for file in missing:
            hf_hub_download(repository, file, revision=commit)
    _keep_commit(path.parents[2] / "refs", revision, commit)
    return path.parent


def _known(name: str, file: str, size: int | None) -> int:
    if size is None:
        raise AdapterError(f"adapter {name!r}: the hub does not report the size of {file}")
    return size


def _is_cached(repository: str, file: str, commit: str) -> bool:
    from huggingface_hub import try_to_load_from_cache

    return isinstance(try_to_load_from_cache(repository, file, revision=commit), str)


def _keep_commit(refs: Path, revision: str, commit: str) -> None:
    """Store the commit of a branch or tag where the hub's library looks when it is offline."""
    path = refs / revision
    if revision == commit or not path.resolve().is_relative_to(refs.resolve()):
        return
    if not path.is_file() or path.read_text(encoding="utf-8") != commit:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(commit, encoding="utf-8")


def _cached(repository: str, revision: str) -> Path | None:
    """Return the directory of the adapter's files if they were fetched before."""
    from huggingface_hub import try_to_load_from_cache

    found = [
        try_to_load_from_cache(repository, name, revision=revision) for name in (CONFIG_NAME, WEIGHTS_NAME)
    ]
    return Path(str(found[0])).parent if all(isinstance(one, str) for one in found) else None


def make_resolver(text: str, budget: HubBudget | None = None) -> LoraResolver:
    """Make the resolver that ``--lora-resolver`` names; ``budget``: of what it fetches.

    Raises ``ConfigError`` if its directory does not exist.
    """
    kind, argument = parse_lora_resolver(text)
    if kind == "hub":
        return HubResolver(argument, budget)
    directory = Path(str(argument))
    if is_directory(str(directory)) is False:
        raise ConfigError(f"--lora-resolver directory:{directory}: there is no such directory")
    return DirectoryResolver(directory)

"""What the engine core asks of adapter versions, and what a version does to a request."""

import dataclasses
from typing import Protocol

from ..adapters.registry import AdapterVersion
from ..errors import AdapterChangedError
from ..plan import AdapterId
from ..sampling import SamplingParams
from .messages import AddRequest


class AdapterVersions(Protocol):
    """Where adapter names are resolved and references are counted: the manager, or its registry."""

    def version(self, adapter_id: AdapterId) -> AdapterVersion:
        """Return a version that some request uses."""
        ...

    def resolve(self, name: str) -> AdapterVersion:
        """Return the version that new requests use.

        Raises ``UnknownModelError`` or ``AdapterUnavailableError``.
        """
        ...

    def acquire(self, adapter_id: AdapterId) -> None:
        """A request uses this version from now on."""
        ...

    def release(self, adapter_id: AdapterId) -> bool:
        """A request that used this version has ended; True = nothing names it any more."""
        ...


def sampling_of(message: AddRequest, version: AdapterVersion) -> SamplingParams:
    """Return the parameters with the adapter's end tokens beside the base's.

    Raises ``AdapterChangedError`` if other conventions made the tokens of its prompt.
    """
    conventions, sampling = version.conventions, message.sampling
    if message.conventions not in (None, conventions.digest):
        raise AdapterChangedError(
            f"adapter {version.name!r} was loaded again with another chat template, tokenizer or "
            "end token while the request was on its way; send it again",
            param="lora_request",
        )
    if sampling.ignore_eos or not conventions.eos_token_ids:
        return sampling
    ends = (*sampling.stop_token_ids, *conventions.eos_token_ids)
    return dataclasses.replace(sampling, stop_token_ids=ends)

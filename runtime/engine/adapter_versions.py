"""The interface of adapter versions for the engine core, and their effect on requests."""

import dataclasses
from typing import Protocol

from ..adapters.registry import AdapterVersion
from ..errors import AdapterChangedError
from ..plan import AdapterId
from ..sampling import SamplingParams
from .messages import AddRequest


class AdapterVersions(Protocol):
    """Resolves adapter names and counts references: the manager, or its registry."""

    def version(self, adapter_id: AdapterId) -> AdapterVersion:
        """Return a version that a request uses."""
        ...

    def resolve(self, name: str) -> AdapterVersion:
        """Return the version for new requests.

        Raises ``UnknownModelError`` or ``AdapterUnavailableError``.
        """
        ...

    def acquire(self, adapter_id: AdapterId) -> None:
        """Take a reference for a request."""
        ...

    def release(self, adapter_id: AdapterId) -> bool:
        """Return a request's reference; True = no name refers to the version any more."""
        ...


def sampling_of(message: AddRequest, version: AdapterVersion) -> SamplingParams:
    """Return the parameters with the adapter's end tokens added to the base's.

    Raises ``AdapterChangedError`` if the prompt was made by other conventions.
    """
    conventions, sampling = version.conventions, message.sampling
    if message.conventions not in (None, conventions.digest):
        raise AdapterChangedError(
            f"adapter {version.name!r} was reloaded with another chat template, tokenizer or end "
            "token after the request's prompt was made; send the request again",
            param="lora_request",
        )
    if sampling.ignore_eos or not conventions.eos_token_ids:
        return sampling
    ends = (*sampling.stop_token_ids, *conventions.eos_token_ids)
    return dataclasses.replace(sampling, stop_token_ids=ends)

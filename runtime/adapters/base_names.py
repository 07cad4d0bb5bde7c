"""Compares the base model that an adapter names with the served one, by name.

Names are paths and hub ids. Their last parts are compared, ignoring case and suffixes of
quantisation. A path is ignored if its last part names no model.
"""

import logging
import re
from dataclasses import dataclass, field

_LOG = logging.getLogger(__name__)

_QUANTIZED = re.compile(
    r"(?:[-_.](?:unsloth|bnb|nf4|fp4|fp8|gptq|awq|int[48]|[48]bit|w\d+a\d+|dynamic|quantized|"
    r"\d+g|g\d+))+$"
)
_IN_FOUR_BITS = re.compile(r"[-_.](?:bnb[-_.]4bit|nf4)$")
# A commit of a hub repository, and common names for directories of any model.
_SAYS_NOTHING = re.compile(
    r".{1,2}|[0-9a-f]{7,64}|(?:(?:base|model|models|llm|hf|checkpoint|ckpt|weights|outputs?|final|merged|"
    r"latest|main|snapshots?|data|step|epoch|run|\d)[-_.]?)*"
)
_HUB_CACHE = "models--"  # prefix of a directory of the hub's cache


def name_in(path: str | None) -> str | None:
    """Return the model's name in a path or hub id, in lower case, or None."""
    parts = [part.lower() for part in re.split(r"[/\\]", path or "") if part]
    cached = [part for part in parts if part.startswith(_HUB_CACHE)]
    name = cached[-1].rpartition("--")[2] if cached else (parts or [""])[-1]
    return None if _SAYS_NOTHING.fullmatch(name) else name


@dataclass(frozen=True, slots=True)
class ServedBase:
    """The served base model."""

    names: tuple[str, ...]  # paths and hub ids, with or without a model's name
    is_quantized: bool  # on disk

    def remark(self, named: str | None) -> str | None:
        """Return a remark on an adapter with this base name, or None."""
        name = name_in(named)
        known = [one for one in map(name_in, self.names) if one is not None]
        if name is None or not known:
            return None
        if _full(name) not in map(_full, known):
            return f"made for {named}, not for the base model that is served ({known[0]})"
        is_copy = name not in known and _QUANTIZED.search(name) is not None
        if is_copy and not self.is_quantized:
            kind = "an nf4" if _IN_FOUR_BITS.search(name) else "a quantised"
            return f"trained over {named}, {kind} copy of the base model, which is served in full"
        return None


@dataclass(slots=True)
class BaseRemarks:
    """Logs remarks on the base models of adapters, once for each base name."""

    served: ServedBase
    _logged: set[str] = field(default_factory=set)

    def log(self, path: str, named: str | None) -> None:
        """``named``: the base that the adapter at ``path`` names."""
        remark = self.served.remark(named)
        if remark is not None and remark not in self._logged:
            self._logged.add(remark)
            _LOG.warning(
                "the adapter in %s is %s; it is served anyway, and further adapters of this base "
                "are not logged",
                path,
                remark,
            )


def full_name_in(path: str | None) -> str | None:
    """Return the name in a path or hub id, of the model that it is a quantised copy of, or None."""
    name = name_in(path)
    return None if name is None else _full(name)


def _full(name: str) -> str:
    # Llama is published with and without the name of its publisher.
    return _QUANTIZED.sub("", name).removeprefix("meta-")

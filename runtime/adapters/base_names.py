"""Whether the base that an adapter names is the one that is served, by what both are called.

Names are paths and hub ids; what counts is their last part, in any case and without suffixes of
quantisation. A path whose last part names no model says nothing, and nothing is concluded from it.
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
# A commit of a hub repository, and what people call directories of any model.
_SAYS_NOTHING = re.compile(
    r".{1,2}|[0-9a-f]{7,64}|(?:(?:base|model|models|llm|hf|checkpoint|ckpt|weights|outputs?|final|merged|"
    r"latest|main|snapshots?|data|step|epoch|run|\d)[-_.]?)*"
)
_HUB_CACHE = "models--"  # of organisation and name, as the hub's cache calls a directory


def name_in(path: str | None) -> str | None:
    """The name of a model in a path or hub id, in lower case; None if there is none."""
    parts = [part.lower() for part in re.split(r"[/\\]", path or "") if part]
    cached = [part for part in parts if part.startswith(_HUB_CACHE)]
    name = cached[-1].rpartition("--")[2] if cached else (parts or [""])[-1]
    return None if _SAYS_NOTHING.fullmatch(name) else name


@dataclass(frozen=True, slots=True)
class ServedBase:
    """What is known of the base that is served."""

    names: tuple[str, ...]  # paths and hub ids; any of them may say nothing
    is_quantized: bool  # on disk

    def remark(self, named: str | None) -> str | None:
        """What is to be said of an adapter that names its base so; None if nothing."""
        name = name_in(named)
        known = [one for one in map(name_in, self.names) if one is not None]
        if name is None or not known:
            return None
        if _full(name) not in map(_full, known):
            return f"made for {named}, another base than the one that is served ({known[0]})"
        is_copy = name not in known and _QUANTIZED.search(name) is not None
        if is_copy and not self.is_quantized:
            kind = "an nf4" if _IN_FOUR_BITS.search(name) else "a quantised"
            return f"trained over {named}, {kind} copy of the base that is served in full"
        return None


@dataclass(slots=True)
class BaseRemarks:
    """Logs what is to be said of adapters' bases, once for each name of a base."""

    served: ServedBase
    _logged: set[str] = field(default_factory=set)

    def log(self, path: str, named: str | None) -> None:
        """``named``: the base that the adapter at ``path`` names."""
        remark = self.served.remark(named)
        if remark is not None and remark not in self._logged:
            self._logged.add(remark)
            _LOG.warning(
                "the adapter in %s is %s; it is served all the same, and further ones of this base "
                "are not named", path, remark,
            )  # fmt: skip


def _full(name: str) -> str:
    # Llama is published with and without the name of its maker.
    return _QUANTIZED.sub("", name).removeprefix("meta-")

"""Known names that are close to an unknown one, for hints in errors."""

import difflib
from collections.abc import Callable, Iterable

_MAX_CHARS = 200  # of a name that is compared: it may be anything, and comparing takes its square


def near_names(
    name: str, known: Iterable[str], hint: str = "; did you mean {}?", *,
    joint: str = " or ", show: Callable[[str], str] = repr, most: int = 3, cutoff: float = 0.6,
) -> str:  # fmt: skip
    """Return ``hint`` with the names of ``known`` that are near to ``name``, or nothing.

    ``most``: of names; ``cutoff``: how alike they are at least, from 0 to 1.
    """
    near = difflib.get_close_matches(name[:_MAX_CHARS], known, n=most, cutoff=cutoff)
    return hint.format(joint.join(map(show, near))) if near else ""

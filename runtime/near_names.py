"""Hints in errors: known names that are similar to an unknown one."""

import difflib
from collections.abc import Callable, Iterable

_MAX_CHARS = 200  # of a compared name: comparing takes quadratic time


def near_names(
    name: str,
    known: Iterable[str],
    hint: str = "; did you mean {}?",
    *,
    joint: str = " or ",
    show: Callable[[str], str] = repr,
    most: int = 3,
    cutoff: float = 0.6,
) -> str:
    """Return ``hint`` with the names of ``known`` that are similar to ``name``, or "".

    ``most``: limit of names. ``cutoff``: smallest similarity, from 0 to 1.
    """
    near = difflib.get_close_matches(name[:_MAX_CHARS], known, n=most, cutoff=cutoff)
    return hint.format(joint.join(map(show, near))) if near else ""

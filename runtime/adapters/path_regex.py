"""Regular expressions over module paths, with a time limit.

PEFT passes patterns of adapter files to ``re``, which a hostile pattern can block without limit and
which cannot be interrupted. ``regex`` can be interrupted. The language is that of ``re``; patterns
that ``regex`` reads differently are refused.
"""

import math
import re
from collections.abc import Callable
from functools import lru_cache

import regex

_MAX_PATTERN_CHARS = 4096
_MAX_WRITTEN_OUT_CHARS = 100_000  # ``regex`` compiles an element once for each repetition
_TIMEOUT_S = 0.1  # of processor time, for one path; usual patterns take microseconds
_COUNT = re.compile(r"\{([0-9]+)[,}]")
# Approximate matching and named classes, which are plain characters to ``re``.
_READ_OTHERWISE = re.compile(r"\[:|(?<!\\)(?:\\\\)*\{(?![0-9]*,[0-9]*\}|[0-9]+\})")

Found = regex.Match[str] | None


class PathRegex:
    """One pattern. Raises ``ValueError`` with the reason if it is refused."""

    def __init__(self, pattern: str) -> None:
        if len(pattern) > _MAX_PATTERN_CHARS:
            raise ValueError(f"it has more than {_MAX_PATTERN_CHARS} characters")
        counts = (max(1, int(count)) for count in _COUNT.findall(pattern))
        if len(pattern) * math.prod(counts) > _MAX_WRITTEN_OUT_CHARS:
            raise ValueError(
                "its counted repetitions can exceed "
                f"{_MAX_WRITTEN_OUT_CHARS} characters when they are written out"
            )
        if _READ_OTHERWISE.search(pattern):
            raise ValueError("'[:', and '{' without a number of repetitions, are not served")
        try:
            re.compile(pattern)
            self._pattern = regex.compile(pattern, regex.VERSION0)
        except (re.error, regex.error, RecursionError, OverflowError) as error:
            raise ValueError(f"it is not a regular expression: {error}") from error

    def fullmatch(self, path: str) -> Found:
        """As ``re.fullmatch``. Raises ``TimeoutError`` if that takes too long."""
        return self._find(self._pattern.fullmatch, path)

    def match(self, path: str) -> Found:
        """As ``re.match``. Raises ``TimeoutError`` if that takes too long."""
        return self._find(self._pattern.match, path)

    def _find(self, find: Callable[..., Found], path: str) -> Found:
        try:
            return find(path, timeout=_TIMEOUT_S)
        except TimeoutError:
            pattern = self._pattern.pattern
            shown = pattern if len(pattern) <= 200 else pattern[:200] + "..."
            raise TimeoutError(
                f"the pattern {shown!r} takes longer than {_TIMEOUT_S} s to match {path}"
            ) from None


@lru_cache(maxsize=1024)
def path_regex(pattern: str) -> PathRegex:
    """Return ``PathRegex(pattern)``, made once."""
    return PathRegex(pattern)

"""Regular expressions over module paths, with limits of time and size.

PEFT passes patterns of adapter files to ``re``, which a hostile pattern can block without limit and
which cannot be interrupted. ``regex`` can be interrupted. The language is that of ``re``; patterns
that ``regex`` reads differently are refused.
"""

import math
import re
import time
from collections.abc import Callable

import regex

_MAX_PATTERN_CHARS = 4096
_MAX_WRITTEN_OUT_CHARS = 100_000  # ``regex`` compiles an element once for each repetition
_MAX_TOTAL_CHARS = 2**18  # written out, of all patterns of an adapter; each takes about 40 bytes
_TIMEOUT_S = 0.1  # of processor time, for one path; usual patterns take microseconds
_TOTAL_TIMEOUT_S = 5.0  # of processor time, for all patterns and paths of an adapter
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
        self.num_chars = len(pattern) * math.prod(counts)  # when it is written out
        if self.num_chars > _MAX_WRITTEN_OUT_CHARS:
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


class PathPatterns:
    """The patterns of one adapter, each compiled once. Used by one thread at a time.

    All methods raise ``ValueError`` for a pattern that is refused, and ``TimeoutError`` if one
    takes too long, or all of them together.
    """

    def __init__(self) -> None:
        self._known: dict[str, PathRegex] = {}
        self._num_chars = 0
        self._spent_s = 0.0

    def add(self, pattern: str) -> PathRegex:
        """Compile a pattern, unless that was done before."""
        known = self._known.get(pattern)
        if known is None:
            begin_s = time.thread_time()
            known = PathRegex(pattern)
            self._num_chars += known.num_chars
            if self._num_chars > _MAX_TOTAL_CHARS:
                raise ValueError(
                    f"the patterns have more than {_MAX_TOTAL_CHARS} characters together when they "
                    "are written out"
                )
            self._known[pattern] = known
            self._spend(begin_s)
        return known

    def fullmatch(self, pattern: str, path: str) -> Found:
        known, begin_s = self.add(pattern), time.thread_time()
        found = known.fullmatch(path)
        self._spend(begin_s)
        return found

    def match(self, pattern: str, path: str) -> Found:
        known, begin_s = self.add(pattern), time.thread_time()
        found = known.match(path)
        self._spend(begin_s)
        return found

    def _spend(self, begin_s: float) -> None:
        self._spent_s += time.thread_time() - begin_s
        if self._spent_s > _TOTAL_TIMEOUT_S:
            raise TimeoutError(f"its patterns take longer than {_TOTAL_TIMEOUT_S:g} s together")

"""Finds held words in docstrings, comments, messages and documents of the repository.

As a script, ``python3 tests/house/words.py PATHS`` prints one line for each word found. It needs
the standard library alone.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
EXCEPTIONS = Path(__file__).with_name("word_exceptions.txt")

# Words for people, which a sentence about a request, an adapter or a process does not need.
_PERSONS = """
    who whom whoever whomever nobody somebody anybody everybody someone everyone anyone
""".split()
# Words and phrases that documentation of software does not use.
_STIFF = (
    "anew",
    "told",
    "hears",
    "heard",
    "comes to",
    "came to",
    "come to be",
    "may not come",
    "by then",
    "whatever",
    "howsoever",
    "thereof",
    "therein",
    "hence",
    "thus",
    "lest",
    "makes way",
    "make way",
    "made way",
    "making way",
    "what has become of",
    "nought",
    "whence",
    "wherein",
)
HELD_WORDS = (*_PERSONS, *_STIFF)

# Every string constant is read here, as most of them are messages; in tests they are mostly data.
_SOURCES = ("runtime", "gpu", "cpu_workers", "shm", "profiles", "bench")
_OTHERS = ("tests", "docs")
_SKIPPED = {"build", "dist", "shared", "results", "node_modules", "__pycache__"}


def _pattern(gap: str) -> re.Pattern[str]:
    words = (re.escape(word).replace(r"\ ", gap) for word in HELD_WORDS)
    return re.compile(rf"\b(?:{'|'.join(words)})\b", re.IGNORECASE)


_HELD = _pattern(r"\s+")
# In unread source, what stands between two words may also be a comment's or a string's mark.
_MAYBE_HELD = _pattern(r"\W+(?:[a-z]{1,2}\W+)?")
_SPACE = re.compile(r"\s+")


@dataclass(frozen=True)
class Text:
    """A text that people read, and the lines of the file that it stands on."""

    text: str
    first_line: int
    last_line: int


@dataclass(frozen=True)
class Offender:
    """A held word in a file, with the text around it on one line."""

    path: str
    line: int
    word: str
    before: str
    after: str

    def __str__(self) -> str:
        text = f"{self.before[-40:]}{self.word}{self.after[:40]}".strip()
        return f"{self.path}:{self.line}: {self.word!r} in: {text}"

    def is_within(self, sentence: str) -> bool:
        """Whether the word stands inside ``sentence`` here."""
        around = f"{self.before[-len(sentence) :]}{self.word}{self.after[: len(sentence)]}"
        start = min(len(self.before), len(sentence))
        at = around.find(sentence)
        while at >= 0:
            if at <= start and start + len(self.word) <= at + len(sentence):
                return True
            at = around.find(sentence, at + 1)
        return False


def _comments(source: str) -> Iterator[Text]:
    """Blocks of comments on adjacent lines, without their marks."""
    lines: list[str] = []
    last_line = -1
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        if lines and token.start[0] != last_line + 1:
            yield Text("\n".join(lines), last_line - len(lines) + 1, last_line)
            lines = []
        lines.append(token.string.lstrip("#"))
        last_line = token.start[0]
    if lines:
        yield Text("\n".join(lines), last_line - len(lines) + 1, last_line)


def _string_of(node: ast.AST) -> str | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(_string_of(part) or "{}" for part in node.values)
    return None


def _strings(tree: ast.Module, docstrings_only: bool) -> Iterator[Text]:
    nodes: Iterable[ast.AST] = ast.walk(tree)
    if docstrings_only:
        # Strings that stand alone: docstrings, and those below an attribute.
        nodes = (node.value for node in nodes if isinstance(node, ast.Expr))
    parts: set[int] = set()
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            parts.update(id(part) for part in node.values)
        text = _string_of(node)
        if text and id(node) not in parts:
            assert isinstance(node, ast.expr)
            yield Text(text, node.lineno, node.end_lineno or node.lineno)


def texts_of_python(source: str, docstrings_only: bool) -> Iterator[Text]:
    """Its strings, or of these the docstrings alone, and its comments."""
    yield from _strings(ast.parse(source), docstrings_only)
    yield from _comments(source)


def offenders_in(path: str, source: str) -> Iterator[Offender]:
    """Held words of one file; what is read of it follows from ``path`` below the repository."""
    if not _MAYBE_HELD.search(source.replace("\\n", "  ")):
        return
    if path.endswith(".py"):
        folder = path.partition("/")[0]
        texts = texts_of_python(source, docstrings_only=folder not in _SOURCES)
    else:
        texts = iter([Text(source, 1, source.count("\n") + 1)])
    lines = source.splitlines()
    for text in texts:
        for match in _HELD.finditer(text.text):
            word = _SPACE.sub(" ", match[0])
            yield Offender(
                path,
                _line_of(text, match, lines),
                word,
                _SPACE.sub(" ", text.text[: match.start()]),
                _SPACE.sub(" ", text.text[match.end() :]),
            )


def _line_of(text: Text, match: re.Match[str], lines: list[str]) -> int:
    """The line of the file on which ``match`` of ``text`` begins."""
    word = re.compile(rf"(?:\b|\\n){match[0].split()[0]}\b")
    left = len(word.findall(text.text[: match.end()]))
    for number in range(text.first_line, text.last_line + 1):
        left -= len(word.findall(lines[number - 1]))
        if left <= 0:
            return number
    return text.first_line


def files_of_repository() -> Iterator[Path]:
    """All that people read: sources, tests, examples, and every document."""
    for path in sorted(ROOT.iterdir()):
        if path.is_dir() and path.name in (*_SOURCES, *_OTHERS):
            yield from _files_below(path)
        elif path.suffix in {".md", ".py"}:
            yield path


def _files_below(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        if path.name.startswith(".") or path.name in _SKIPPED:
            continue
        if path.is_dir():
            yield from _files_below(path)
        elif path.suffix in {".md", ".py"}:
            yield path


def offenders(files: Iterable[Path]) -> Iterator[Offender]:
    """Held words of files of the repository, whether or not they are excepted."""
    for path in files:
        name = path.resolve().relative_to(ROOT).as_posix()
        yield from offenders_in(name, path.read_text(encoding="utf-8"))


def read_exceptions() -> list[tuple[str, str]]:
    """Path and part of a sentence, of each line of the file of exceptions."""
    lines = EXCEPTIONS.read_text(encoding="utf-8").splitlines()
    parts = (line.partition(": ") for line in lines if line and not line.startswith("#"))
    return [(path, sentence) for path, _, sentence in parts]


def main(paths: list[str]) -> int:
    """Prints what is found below ``paths``, or in the whole repository; 1 if there is any."""
    files: list[Path] = [] if paths else list(files_of_repository())
    for path in map(Path, paths):
        files.extend(_files_below(path.resolve()) if path.is_dir() else [path])
    excepted = read_exceptions()
    num_found = 0
    for offender in offenders(files):
        if not any(p == offender.path and offender.is_within(s) for p, s in excepted):
            sys.stdout.write(f"{offender}\n")
            num_found += 1
    return 1 if num_found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

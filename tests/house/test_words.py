"""No held word stands in what people read, but in a few sentences about people."""

from house.words import HELD_WORDS, ROOT, files_of_repository, offenders, offenders_in, read_exceptions

_MAX_EXCEPTIONS = 20
_SAMPLE = '''\
"""A cache."""

# A request waits here by
# then.
class Cache:
    """Keeps adapters, whoever asks.

    Nobody waits.
    """

    def check(self, name: str) -> None:
        nobody = "who" if name else "cow's whole"
        raise KeyError(f"adapter {name!r} comes "
            f"to {nobody}\\nanew")
'''


def _found(path: str, source: str) -> set[tuple[int, str]]:
    return {(offender.line, offender.word) for offender in offenders_in(path, source)}


def test_held_words_are_only_in_excepted_sentences() -> None:
    exceptions = read_exceptions()
    unused = set(exceptions)
    wrong = []
    for offender in offenders(files_of_repository()):
        matching = {e for e in exceptions if e[0] == offender.path and offender.is_within(e[1])}
        unused -= matching
        if not matching:
            wrong.append(str(offender))
    assert not wrong, "\n".join(wrong)
    assert not unused, f"exceptions that match nothing: {sorted(unused)}"


def test_exceptions_stay_few() -> None:
    assert len(read_exceptions()) <= _MAX_EXCEPTIONS


def test_whole_repository_is_read() -> None:
    names = {path.relative_to(ROOT).as_posix() for path in files_of_repository()}
    assert {
        "README.md",
        "CHANGELOG.md",
        "__init__.py",
        "runtime/plan.py",
        "runtime/server/README.md",
        "tests/house/words.py",
        "bench/RESULTS.md",
    } <= names


def test_finds_words_in_strings_and_comments_of_sources() -> None:
    assert _found("gpu/cache.py", _SAMPLE) == {
        (3, "by then"),
        (6, "whoever"),
        (8, "Nobody"),
        (12, "who"),
        (13, "comes to"),
        (14, "anew"),
    }


def test_reads_docstrings_and_comments_alone_in_tests() -> None:
    assert _found("tests/test_cache.py", _SAMPLE) == {(3, "by then"), (6, "whoever"), (8, "Nobody")}


def test_finds_words_in_documents() -> None:
    assert _found("docs/cache.md", "# Cache\n\nIt may not\ncome. It comes.\n") == {(3, "may not come")}


def test_finds_every_held_word() -> None:
    for word in HELD_WORDS:
        assert word in {offender.word for offender in offenders_in("a.md", f"a {word}, b")}
        assert not list(offenders_in("a.md", f"a x{word} {word}x"))


def test_exception_holds_for_its_sentence_alone() -> None:
    first, second = offenders_in("a.md", "A person who\nreads. A row who waits.")
    assert first.is_within("A person who reads.")
    assert not second.is_within("A person who reads.")
    assert not first.is_within("person")

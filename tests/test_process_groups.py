"""Groups of tests that run in one process."""

from pathlib import Path

from support import process_groups
from support.process_groups import group_of


def test_groups_name_what_there_is(repository: Path) -> None:
    for path in (*process_groups.PINNED, *process_groups.SERVED):
        assert list(repository.glob(f"{path}*")), path


def test_a_file_is_a_group_unless_it_shares_one() -> None:
    assert group_of("tests/shm/test_words.py") == "tests/shm/test_words.py"
    assert group_of("tests/parity/test_coexecution_life.py") == "pinned"
    assert group_of("tests/house/test_names.py") == group_of("tests/house/test_words.py")
    assert group_of("tests/e2e/test_answers.py") == group_of("tests/e2e/test_sampling.py")

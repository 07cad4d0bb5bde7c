"""The package as its users import it."""

import corun


def test_version_is_set() -> None:
    assert corun.__version__.count(".") == 2

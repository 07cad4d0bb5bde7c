"""A slow start fails the bound, unless the machine itself was slow now and then."""

import pytest
from startup import judge


@pytest.mark.parametrize(
    ("warm_s", "controls_s", "expected"),
    [
        ([6.9, 4.0], [1.0, 1.0], True),
        ([6.9, 4.0], [1.0, 2.0], True),
        ([6.9, 7.0], [1.0, 1.2], False),
        ([6.9, 7.0], [1.0, 1.3], None),
    ],
)
def test_judge(warm_s: list[float], controls_s: list[float], expected: bool | None) -> None:
    assert judge(warm_s, controls_s, 7.0) is expected

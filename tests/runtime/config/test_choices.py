"""Choices made of named parts are those parts."""

from corun.cpu_workers.deltas.base import BACKEND_NAMES
from corun.gpu.linear.select import BACKENDS
from corun.runtime.config.engine import DELTA_BACKENDS, LINEAR_BACKENDS


def test_choices_are_the_parts_that_there_are() -> None:
    assert ("auto", *BACKENDS) == LINEAR_BACKENDS
    assert ("auto", *BACKEND_NAMES) == DELTA_BACKENDS

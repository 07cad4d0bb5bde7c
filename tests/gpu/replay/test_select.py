"""Decode passes are captured only where all large kernels can be."""

import logging

import pytest
from corun.gpu.replay.decode_graphs import OFF, ONCE_VERIFIED, select_decode_graphs


def test_graphs_are_off_for_backends_that_do_not_launch(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="corun"):
        numba = {"attention": "numba", "LoRA": "numba"}
        assert select_decode_graphs("auto", {**numba, "LoRA": "torch"}, "cpu") == OFF
        assert select_decode_graphs("off", numba, "cpu") == OFF
        assert select_decode_graphs("auto", numba, "cpu") == ONCE_VERIFIED
    assert [record.getMessage() for record in caplog.records] == [
        "decode graphs: off (LoRA torch)",
        "decode graphs: off (configured)",
    ]

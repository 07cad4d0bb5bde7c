"""The devices on which a test runs its body: the CPU, and CUDA where there is one."""

import pytest

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            # Of a default that will change in the version after; nothing here depends on it.
            pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION"),
        ],
    ),
]

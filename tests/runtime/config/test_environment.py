"""What processes of corun's own set before they load libraries."""

import pytest
from corun.cpu_workers.kernels.simd.isa import forcing_environment
from corun.runtime.config.environment import own_environment


@pytest.mark.parametrize("cpu_isa", ["auto", "avx2"])
def test_the_level_and_the_queues_of_cuda_are_set(cpu_isa: str) -> None:
    queues = {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}
    assert own_environment(cpu_isa, {}) == forcing_environment(cpu_isa) | queues


def test_what_the_user_set_stays() -> None:
    assert own_environment("auto", {"CUDA_DEVICE_MAX_CONNECTIONS": "4"}) == {}

"""Signs of a busy machine."""

import pytest
from corun.profiles.busy import CpuUse, busy_reasons, relative_spread


def test_a_quiet_machine_has_no_signs() -> None:
    assert busy_reasons(CpuUse(10.0, 19.0, 0.1, 18.5), [0.01, 0.02, 0.3]) == ()


@pytest.mark.parametrize(
    ("use", "spreads", "reason"),
    [
        (CpuUse(10.0, 25.0, 0.0, 10.0), [0.01], "other programs used 1.5 CPUs"),
        (CpuUse(10.0, 10.0, 5.0, 10.0), [0.01], "the hypervisor withheld 0.5 CPUs"),
        (CpuUse(10.0, 10.0, 0.0, 10.0), [0.01, 0.25, 0.5], "differ by 25% in the median"),
    ],
)
def test_each_sign_is_told(use: CpuUse, spreads: list[float], reason: str) -> None:
    (found,) = busy_reasons(use, spreads)
    assert reason in found


def test_own_use_on_other_cpus_is_nobody_elses() -> None:
    assert CpuUse(10.0, 5.0, 0.0, 8.0).foreign_cpus == 0.0
    assert CpuUse(0.0, 0.0, 0.0, 0.0).foreign_cpus == 0.0


def test_spread_is_the_median_distance() -> None:
    assert relative_spread([1.0, 1.1]) == 0.0
    assert relative_spread([1.0, 1.0, 1.0, 9.0]) == 0.0
    assert relative_spread([8.0, 10.0, 13.0]) == pytest.approx(0.2)

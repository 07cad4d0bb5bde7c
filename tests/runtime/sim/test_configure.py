"""Simulated machines of options and of profiles."""

from dataclasses import replace
from pathlib import Path

import pytest
from corun.profiles.profile import Machine, save_profile
from corun.runtime.config.engine import EngineConfig
from corun.runtime.sim.configure import machine_of
from support.profiles import PROFILE, SUBJECT


@pytest.mark.parametrize(("device", "num_tokens"), [("cpu", 512), ("NVIDIA H100 80GB HBM3", 2048)])
def test_a_profile_is_simulated_with_the_steps_of_its_device(
    tmp_path: Path, device: str, num_tokens: int
) -> None:
    path = tmp_path / "profile.json"
    subject = replace(SUBJECT, machine=Machine("A CPU", 2, device))
    save_profile(replace(PROFILE, subject=subject), path)
    machine = machine_of(str(path), "chat", EngineConfig(), frozenset())
    assert machine.max_num_batched_tokens == num_tokens
    assert machine.separate_assisted_rows == (device != "cpu")
    given = EngineConfig(max_num_batched_tokens=64)
    machine = machine_of(str(path), "chat", given, frozenset({"max_num_batched_tokens"}))
    assert machine.max_num_batched_tokens == 64

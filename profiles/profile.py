"""A saved profile: where, when and with what it was measured, and the models fitted to it.

Plain data with a JSON form; measuring it is another module's job.
"""

from dataclasses import dataclass
from pathlib import Path

import msgspec

from .models import MachineModel

FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True)
class Machine:
    """What must be the same for a profile to hold."""

    cpu_model: str
    num_cpus: int  # that the process may use
    device: str  # "cpu", or the accelerator's name
    torch_version: str
    corun_version: str


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The base model as far as its speed depends on it."""

    num_layers: int
    dtype: str
    groups: tuple[tuple[str, int, int], ...]  # first target's name, input width, output columns


@dataclass(frozen=True, slots=True)
class Quality:
    """How well the fitted models predict held-out batches."""

    decode_r_squared: float
    prefill_r_squared: float
    is_machine_busy: bool  # somebody else computed meanwhile


@dataclass(frozen=True, slots=True)
class Profile:
    """Everything that ``corun profile`` writes."""

    machine: Machine
    shape: ModelShape
    created_at: str  # ISO 8601, UTC
    is_thorough: bool
    model: MachineModel
    min_group_bytes: int  # of a layer group
    quality: Quality
    delta_backends: tuple[tuple[str, tuple[tuple[int, str], ...]], ...]  # group: (tokens, name)
    format_version: int = FORMAT_VERSION


class ProfileError(Exception):
    """A profile file cannot be used."""


def save_profile(profile: Profile, path: Path) -> None:
    """Write ``profile`` as indented JSON; a reader never sees half of it."""
    text = msgspec.json.format(msgspec.json.encode(profile), indent=2)
    temporary = path.with_name(path.name + ".new")
    temporary.write_bytes(text + b"\n")
    temporary.replace(path)


def load_profile(path: Path) -> Profile:
    """Read what ``save_profile`` wrote. Raises ``ProfileError`` naming the file and the reason."""
    try:
        profile = msgspec.json.decode(path.read_bytes(), type=Profile)
    except (OSError, msgspec.MsgspecError, ValueError) as error:
        raise ProfileError(f"{path} holds no profile: {error}") from error
    if profile.format_version != FORMAT_VERSION:
        raise ProfileError(
            f"{path} has format {profile.format_version}, this corun reads {FORMAT_VERSION}; "
            "run corun profile again"
        )
    return profile


def differences(profile: Profile, machine: Machine, shape: ModelShape) -> tuple[str, ...]:
    """What is not as it was when ``profile`` was made, in words; empty if it holds."""
    pairs = [
        ("CPU", profile.machine.cpu_model, machine.cpu_model),
        ("number of CPUs", profile.machine.num_cpus, machine.num_cpus),
        ("device", profile.machine.device, machine.device),
        ("torch", profile.machine.torch_version, machine.torch_version),
        ("corun", profile.machine.corun_version, machine.corun_version),
        ("layers", profile.shape.num_layers, shape.num_layers),
        ("dtype", profile.shape.dtype, shape.dtype),
        ("widths", profile.shape.groups, shape.groups),
    ]
    return tuple(f"{name}: {then} then, {now} now" for name, then, now in pairs if then != now)

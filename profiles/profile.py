"""A saved profile: machine, time and options of its measurement, and the fitted models.

Plain data with a JSON form; ``profiles.measure`` measures it.
"""

from dataclasses import dataclass, fields
from pathlib import Path

import msgspec

from .curve import Curve
from .fit import Fit
from .models import MachineModel

FORMAT_VERSION = 6
# A linear model is used if it explains this share of the variance. Below, it predicts little better
# than a constant.
MIN_USABLE_R_SQUARED = 0.5
# Or if its errors are at most this. If an accelerator waits for kernel launches, all steps take
# about the same time: a constant predicts them, and there is no variance to explain.
MAX_USABLE_ERROR = 0.25


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine of the measurement."""

    cpu_model: str
    num_cpus: int  # that the process may use
    device: str  # "cpu", or the accelerator's name


@dataclass(frozen=True, slots=True)
class Settings:
    """Options that change the figures."""

    num_threads: int  # of the CPU device; 0 where the model runs on an accelerator
    has_workers: bool  # without any, invocations are not measured
    worker_slowdown: float
    delta_backend: str  # auto, or the one set by an option
    link: str  # unpaced, or bandwidth and latency
    backends: tuple[str, ...]  # of linears, attention and LoRA


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The properties of the base model that its speed depends on."""

    num_layers: int
    dtype: str
    groups: tuple[tuple[str, int, int], ...]  # first target's name, input width, output columns
    kv_bytes_per_token: int  # over all layers


@dataclass(frozen=True, slots=True)
class Subject:
    """The subject of a profile. ``machine``, ``settings`` and ``shape`` name its file."""

    machine: Machine
    settings: Settings
    shape: ModelShape
    torch_version: str
    corun_version: str


@dataclass(frozen=True, slots=True)
class Quality:
    """The quality of the measurement."""

    busy_reasons: tuple[str, ...]  # signs that other programs computed; () = a quiet machine
    left_out: tuple[str, ...]  # measurements that did not fit into the time

    @property
    def is_machine_busy(self) -> bool:
        """Whether other programs computed during the measurement."""
        return bool(self.busy_reasons)


@dataclass(frozen=True, slots=True)
class FitRecord:
    """Times that a plane was fitted to."""

    fit: Fit
    # Jobs: see ``measure.deltas.fit_jobs``. Steps: see ``measure.step_shapes.step_point``. Adapters in
    # decode: bytes of the batch's; in prefill: tokens times bytes, tokens, and bytes.
    points: tuple[tuple[float, ...], ...]
    y: tuple[float, ...]  # seconds: of a job, or over all layers


@dataclass(frozen=True, slots=True)
class LinkPoint:
    """Copies of one size from the host to the device, several at a time."""

    chunk_bytes: int
    concurrency: int
    bytes_per_s: float  # of all together


@dataclass(frozen=True, slots=True)
class DeltaCurves:
    """One input group on one worker core, at the reference rank: seconds by back end."""

    group: str
    rank_sum: int
    curves: tuple[tuple[str, Curve], ...]
    choices: tuple[tuple[int, str], ...]  # (first tokens, fastest back end), ascending


@dataclass(frozen=True, slots=True)
class DeltaPoint:
    """One job of one back end on a worker core; workers choose their back end by these."""

    backend: str
    num_tokens: int
    rank_sum: int
    num_values: int  # of all matrices A and B
    time_us: float


@dataclass(frozen=True, slots=True)
class RankBudget:
    """The budget for one rank, on all targets of the model."""

    rank: int
    adapter_bytes: int
    tokens_per_worker: int


@dataclass(frozen=True, slots=True)
class Profile:
    """Everything that ``corun profile`` writes."""

    subject: Subject
    created_at: str  # ISO 8601, UTC
    model: MachineModel
    min_group_bytes: int  # of a layer group
    coexecution_off: str  # why workers were not measured; "" = they were
    reference_rank: int  # of the deltas
    budgets: tuple[RankBudget, ...]
    deltas: tuple[DeltaCurves, ...]  # by input group
    delta_points: tuple[DeltaPoint, ...]  # of all back ends worth loading
    job_fit: FitRecord
    step_fit: FitRecord
    decode_fit: FitRecord
    prefill_fit: FitRecord
    link_points: tuple[LinkPoint, ...]
    quality: Quality
    measured_s: float  # duration of measuring
    free_bytes: int  # of the device's memory beside the model and, on CUDA, the largest step
    format_version: int = FORMAT_VERSION

    @property
    def fits(self) -> tuple[tuple[str, FitRecord], ...]:
        """All linear models by their subject."""
        return (
            *(() if self.coexecution_off else (("jobs of CPU workers", self.job_fit),)),
            ("whole steps", self.step_fit),
            ("adapters in decode", self.decode_fit),
            ("adapters in prefill", self.prefill_fit),
        )


class ProfileError(Exception):
    """A profile cannot be measured, or its file cannot be used."""


def check_fits(profile: Profile) -> None:
    """Raise ``ProfileError`` if a linear model explains too little and has large errors."""
    useless = [
        f"that of {name} explains {record.fit.r_squared:.2f}{_error_of(record.fit)}"
        for name, record in profile.fits
        if not record.fit.r_squared >= MIN_USABLE_R_SQUARED and not is_within(record.fit, MAX_USABLE_ERROR)
    ]
    if useless:
        busy = "; ".join(profile.quality.busy_reasons)
        said = f"{', '.join(useless)}{busy and f' (the machine was busy: {busy})'}"
        raise ProfileError(
            "the profile cannot predict step times: its linear models must explain "
            f"{MIN_USABLE_R_SQUARED:g} of the variance (R^2) of held-out batches or be within "
            f"{MAX_USABLE_ERROR:.0%} of them, and {said}; measure it while nothing else computes, "
            "or for longer (corun profile --budget-s 300)"
        )


def is_within(fit: Fit, bound: float) -> bool:
    """Whether the relative error of a fit is known and at most ``bound``."""
    return fit.relative_error is not None and fit.relative_error <= bound


def _error_of(fit: Fit) -> str:
    return "" if fit.relative_error is None else f" with errors of {fit.relative_error:.0%}"


def save_profile(profile: Profile, path: Path) -> None:
    """Write ``profile`` as indented JSON; a reader never sees half of it.

    Raises ``ProfileError`` if the file cannot be written.
    """
    text = msgspec.json.format(msgspec.json.encode(profile), indent=2)
    temporary = path.with_name(path.name + ".new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(text + b"\n")
        temporary.replace(path)
    except OSError as error:
        raise ProfileError(f"{path} cannot be written: {error.strerror or error}") from error


def load_profile(path: Path) -> Profile:
    """Read what ``save_profile`` wrote. Raises ``ProfileError`` naming the file and the reason.

    Profiles that cannot predict are refused; see ``check_fits``.
    """
    try:
        data = path.read_bytes()
        version = msgspec.json.decode(data, type=_Version).format_version
        if version != FORMAT_VERSION:
            raise ProfileError(
                f"{path} has format {version}, this corun reads {FORMAT_VERSION}; run corun profile again"
            )
        profile = msgspec.json.decode(data, type=Profile)
    except (OSError, msgspec.MsgspecError, ValueError) as error:
        raise ProfileError(f"{path} holds no profile: {error}") from error
    try:
        check_fits(profile)
    except ProfileError as error:
        raise ProfileError(f"{path} is not used: {error}") from None
    return profile


class _Version(msgspec.Struct):
    format_version: int


def differences(then: object, now: object) -> tuple[str, ...]:
    """Fields of two ``Machine``, ``Settings`` or ``ModelShape`` that differ, in words."""
    assert type(then) is type(now)
    names = [item.name for item in fields(then)]  # type: ignore[arg-type]
    pairs = [(name, getattr(then, name), getattr(now, name)) for name in names]
    return tuple(
        f"{name.replace('_', ' ')}: {_text(a)} then, {_text(b)} now" for name, a, b in pairs if a != b
    )


def _text(value: object) -> str:
    if isinstance(value, tuple):
        return ", ".join(_text(item) for item in value) or "none"
    return str(value)

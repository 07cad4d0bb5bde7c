"""A profile with figures that are easy to check."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

from corun.cpu_workers.teams import JobModel
from corun.profiles import profile
from corun.profiles.curve import Curve
from corun.profiles.fit import Fit, Plane
from corun.profiles.models import GroupModel, LinkModel, LoraModel, MachineModel
from corun.profiles.profile import (
    DeltaCurves,
    DeltaPoint,
    FitRecord,
    LinkPoint,
    Machine,
    ModelShape,
    Profile,
    Quality,
    RankBudget,
    Settings,
    Subject,
)

_CURVE = Curve((1.0, 64.0, 512.0), (0.001, 0.002, 0.016))
_DECODE = FitRecord(Fit(Plane((1e-9,), 1e-5), 0.99, 3, 3), ((1e6,), (2e6,), (4e6,)), (1e-3, 2e-3, 4e-3))
_PREFILL = FitRecord(
    Fit(Plane((1e-12, 1e-6, 2e-12), 1e-5), 0.98, 2, 2),
    ((1e9, 8.0, 1.25e8), (2e9, 16.0, 1.25e8)),
    (1e-3, 2e-3),
)

_JOBS = FitRecord(
    Fit(Plane((1e-10, 1e-10), 1e-5), 0.99, 3, 3),
    ((36864.0, 192.0), (36864.0, 1536.0), (294912.0, 12288.0)),
    (1.4e-5, 1.5e-5, 4e-5),
)
_STEPS = FitRecord(
    Fit(Plane((1.0, 2e-5, 3e-9, 4e-8), 5e-4), 0.99, 3, 3),
    ((1e-3, 1.0, 0.0, 500.0), (2e-3, 64.0, 0.0, 640.0), (0.016, 1.0, 1e5, 0.0)),
    (2e-3, 4e-3, 0.02),
)

SUBJECT = Subject(
    machine=Machine("A CPU", 2, "cpu"),
    settings=Settings(1, True, 1.0, "auto", "1 GiB/s + 0 us", ("plain", "torch", "torch")),
    shape=ModelShape(2, "bfloat16", (("q_proj", 64, 128),), 512),
    torch_version="2.13.0",
    corun_version="0.1.0",
)

PROFILE = Profile(
    subject=SUBJECT,
    created_at="2026-11-21T10:00:00+00:00",
    model=MachineModel(
        num_layers=2,
        step_s=_CURVE,
        groups=(GroupModel("q_proj", _CURVE, 192.0),),
        invocation_s=2e-5,
        lora=LoraModel(1e-9, 1e-5, 1e-12, 1e-5, 1e-6, 2e-12),
        link=LinkModel(1e10, 1e-5),
        num_workers=1,
        job=JobModel(1e-10, 1e-11, 1e-10, 1e-5, 1e-6, 2e-6),
        invocation_s_per_token=1e-7,
        host_step_s=5e-4,
        decode_step_s=Curve((1.0, 64.0), (0.0005, 0.0015)),
        host_row_s=2e-5,
        turn_s=3e-4,
        turn_row_s=1e-5,
        prefill_s_per_token_key=3e-9,
        decode_s_per_key=4e-8,
    ),
    min_group_bytes=1 << 20,
    coexecution_off="",
    reference_rank=64,
    budgets=(RankBudget(8, 1 << 20, 512), RankBudget(64, 8 << 20, 64)),
    deltas=(
        DeltaCurves("q_proj", 192, (("numba", _CURVE), ("torch", _CURVE)), ((1, "numba"), (128, "torch"))),
    ),
    delta_points=(DeltaPoint("numba", 1, 192, 36864, 10.0),),
    job_fit=_JOBS,
    step_fit=_STEPS,
    decode_fit=_DECODE,
    prefill_fit=_PREFILL,
    link_points=(LinkPoint(1 << 16, 1, 5e9), LinkPoint(1 << 20, 1, 9e9)),
    quality=Quality((), ()),
    measured_s=12.0,
    free_bytes=1 << 30,
)


def with_r_squared(name: str, r_squared: float, relative_error: float | None = None) -> Profile:
    """``PROFILE`` with a fit, as ``step_fit``, that explains so much, with errors of this size."""
    record: FitRecord = getattr(PROFILE, name)
    fit = replace(record.fit, r_squared=r_squared, relative_error=relative_error)
    changes: dict[str, Any] = {name: replace(record, fit=fit)}
    return replace(PROFILE, **changes)


@contextmanager
def any_fit() -> Iterator[None]:
    """Accept profiles with linear models of any accuracy: tests measure on busy machines."""
    with mock.patch.object(profile, "MIN_USABLE_R_SQUARED", -math.inf):
        yield

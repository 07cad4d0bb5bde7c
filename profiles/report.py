"""A profile as text: the table that ``corun profile`` prints at its end. Pure."""

from collections.abc import Iterator, Sequence

from .curve import Curve
from .models import GroupModel, MachineModel
from .profile import DeltaCurves, FitRecord, Profile, is_within

MIN_R_SQUARED = 0.96  # Toppings, figure 11: below it linear models are unreliable
_MAX_ERROR = 0.1  # of a model that needs no warning: if times hardly differ, R^2 says nothing
_SHOWN_TOKENS = 64  # of the figures by input group
_VALUES = 1e6  # of the figures of jobs


def report_lines(profile: Profile) -> Iterator[str]:
    """The main figures, one line each."""
    subject, model = profile.subject, profile.model
    machine, shape = subject.machine, subject.shape
    yield (
        f"profile of {shape.num_layers} layers in {shape.dtype} on {machine.device} "
        f"({machine.cpu_model}, {machine.num_cpus} CPUs), measured in {profile.measured_s:.0f} s"
    )
    yield f"  prefill      {_points(model.step_s, 'tokens')}"
    assert model.decode_step_s is not None, "it is measured"
    yield f"  decode       {_points(model.decode_step_s, 'rows')}"
    yield f"  steps        {_steps(profile)}"
    link = f"{model.link.bytes_per_s / 2**30:.3g} GiB/s + {_time(model.link.latency_s)}"
    yield f"  link         {link}; layer groups from {_bytes(profile.min_group_bytes)} on"
    yield f"  workers      {_workers(profile)}"
    yield f"  jobs         {_jobs(profile)}"
    yield f"  adapters     {_decode(profile)}"
    yield f"               {_prefill(profile)}"
    yield ""
    reference = profile.reference_rank
    yield f"  {'input group':<16}{'base':>10}{'delta':>10}  fastest back end at rank {reference}"
    for group, deltas in zip(model.groups, profile.deltas, strict=True):
        yield f"  {_group(model, group, deltas)}"
    yield (
        f"  ({_SHOWN_TOKENS} tokens; base: products with the base weights, on the device; delta: "
        "LoRA deltas, on one worker core)"
    )
    yield ""
    yield f"  {'rank':>6}{'adapter':>12}{'tokens per worker core':>26}"
    for budget in profile.budgets:
        size = _bytes(budget.adapter_bytes)
        yield f"  {budget.rank:>6}{size:>12}{budget.tokens_per_worker:>26}"
    yield "  (adapters on all targets)"


def warning_lines(profile: Profile) -> Iterator[str]:
    """Reasons for inaccurate figures; empty on a quiet machine with linear kernels."""
    quality = profile.quality
    if quality.is_machine_busy:
        yield (f"the machine was busy, so figures are inaccurate: {'; '.join(quality.busy_reasons)}")
    for name, record in profile.fits:
        if record.fit.r_squared < MIN_R_SQUARED and not is_within(record.fit, _MAX_ERROR):
            yield (
                f"the linear model of {name} explains {record.fit.r_squared:.2f} of the variance "
                f"(R^2) of held-out batches, less than {MIN_R_SQUARED}"
            )
    if quality.left_out:
        yield (
            f"the time was too short for {len(quality.left_out)} measurements, from "
            f"{quality.left_out[0]} on (--budget-s allows more)"
        )


def _steps(profile: Profile) -> str:
    model = profile.model
    return (
        f"in addition {_time(model.host_step_s)} + {_time(model.host_row_s)} per row, "
        f"{_time(model.prefill_s_per_token_key)} per prefill token and key, "
        f"{_time(model.decode_s_per_key)} per key in decode, {_fit(profile.step_fit)}; around it "
        f"the engine takes {_time(model.turn_s)} + {_time(model.turn_row_s)} per row, "
        f"{_time(model.request_s)} for an arriving request and {_time(model.load_s)} for a load"
    )


def _workers(profile: Profile) -> str:
    if profile.coexecution_off:
        return f"none, co-execution is off: {profile.coexecution_off}"
    model = profile.model
    return (
        f"{model.num_workers}; an invocation costs {_time(model.invocation_s)} + "
        f"{_time(model.invocation_s_per_token)} per token in each input group, and "
        f"{_time(model.assisted_pass_s)} in each pass; while both compute, "
        f"the device and they take {1 + model.contention:.2f} times as long"
    )


def _jobs(profile: Profile) -> str:
    job = profile.model.job
    return (
        f"of a worker: {_time(job.call_s)} + the larger of {_time(job.s_per_value * _VALUES)} to read and "
        f"{_time(job.s_per_product * _VALUES)} per token to multiply each million values of A and B + "
        f"{_time(job.s_per_row_value * _VALUES)} per million of x and y, {_fit(profile.job_fit)}; of a team: "
        f"{_time(job.member_s)} for each further member, {_time(job.share_s)} to share a matrix"
    )


def _decode(profile: Profile) -> str:
    lora = profile.model.lora
    per_rank_s = lora.decode_s_per_byte * _bytes_per_rank(profile)
    return (
        f"decode: {_time(lora.decode_fixed_s)} + {_time(per_rank_s)} per rank of each row, "
        f"{_fit(profile.decode_fit)}"
    )


def _prefill(profile: Profile) -> str:
    lora = profile.model.lora
    rank_bytes = _bytes_per_rank(profile)
    return (
        f"prefill: {_time(lora.prefill_fixed_s)} + {_time(lora.prefill_s_per_byte * rank_bytes)} "
        f"per rank + {_time(lora.prefill_s_per_token)} per token + "
        f"{_time(lora.prefill_s_per_token_byte * rank_bytes)} per token and rank, "
        f"{_fit(profile.prefill_fit)}"
    )


def _fit(record: FitRecord) -> str:
    return f"R^2 {record.fit.r_squared:.3f} on {record.fit.num_held_out} held-out batches"


def _bytes_per_rank(profile: Profile) -> float:
    budget = profile.budgets[-1]
    return budget.adapter_bytes / budget.rank


def _group(model: MachineModel, group: GroupModel, deltas: DeltaCurves) -> str:
    base = _time(group.base_s.at(_SHOWN_TOKENS))
    delta = _time(model.job.part_s(deltas.rank_sum, group.width, _SHOWN_TOKENS))
    first, *others = deltas.choices
    names = ", ".join([first[1], *(f"{name} from {tokens} tokens" for tokens, name in others)])
    return f"{group.name:<16}{base:>10}{delta:>10}  {names}"


def _points(curve: Curve, noun: str) -> str:
    places: Sequence[int] = sorted({0, len(curve.x) // 2, len(curve.x) - 1})
    counts = ", ".join(f"{curve.x[place]:.0f}" for place in places)
    times = ", ".join(_time(curve.y[place]) for place in places)
    return f"{counts} {noun}: {times}"


def _time(seconds: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"


def _bytes(num_bytes: float) -> str:
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.3g} {unit}"
    return f"{num_bytes:.0f} bytes"

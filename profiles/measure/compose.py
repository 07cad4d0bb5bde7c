"""Makes a profile of the measurements. Pure."""

from dataclasses import dataclass, replace

from ..busy import CpuUse, busy_reasons
from ..derive import min_group_bytes, tokens_per_worker
from ..models import GroupModel, LoraModel, MachineModel
from ..profile import DeltaPoint, Profile, Quality, RankBudget, Subject
from .base import BaseTimes
from .delta_bench import GroupShape
from .deltas import DeltaTimes
from .effort import REFERENCE_RANK, Effort
from .invocation import InvocationTimes
from .link import LinkTimes
from .lora import LoraTimes
from .step_shapes import with_steps
from .steps import WholeStepTimes


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """All measurements."""

    groups: tuple[GroupShape, ...]
    num_workers: int
    max_tokens: int  # of a step
    base: BaseTimes
    steps: WholeStepTimes
    link: LinkTimes
    deltas: DeltaTimes
    invocation: InvocationTimes | None
    off: str  # why invocations were not measured
    lora_decode: LoraTimes
    lora_prefill: LoraTimes
    bytes_per_rank: float  # of an adapter on all targets

    def quality(self, use: CpuUse) -> Quality:
        """The quality of all parts."""
        measured = (
            self.base,
            self.steps,
            self.link,
            self.deltas,
            self.lora_decode,
            self.lora_prefill,
            *(() if self.invocation is None else (self.invocation,)),
        )
        spreads = [spread for part in measured for spread in part.spreads]
        left_out = tuple(name for part in measured for name in part.left_out)
        return Quality(busy_reasons(use, spreads), left_out)


def compose(
    subject: Subject,
    effort: Effort,
    parts: Parts,
    use: CpuUse,
    *,
    created_at: str,
    measured_s: float,
    free_bytes: int,
) -> Profile:
    """Derive budgets and models, and put the profile together."""
    model = _model(subject, parts)
    budgets = tuple(
        RankBudget(
            rank,
            round(rank * parts.bytes_per_rank),
            tokens_per_worker(model, [rank * len(shape.columns) for shape in parts.groups], parts.max_tokens),
        )
        for rank in effort.delta_ranks
    )
    return Profile(
        subject=subject,
        created_at=created_at,
        model=model,
        min_group_bytes=min_group_bytes(parts.link.model),
        coexecution_off=parts.off,
        reference_rank=REFERENCE_RANK,
        budgets=budgets,
        deltas=parts.deltas.backend_curves(REFERENCE_RANK),
        delta_points=tuple(
            DeltaPoint(
                point.backend,
                point.shape.num_tokens,
                point.shape.rank_sum,
                point.shape.num_values,
                point.time_us,
            )
            for point in parts.deltas.table().points
        ),
        job_fit=parts.deltas.record,
        step_fit=parts.steps.record,
        decode_fit=parts.lora_decode.record,
        prefill_fit=parts.lora_prefill.record,
        link_points=parts.link.points,
        quality=parts.quality(use),
        measured_s=measured_s,
        free_bytes=free_bytes,
    )


def _model(subject: Subject, parts: Parts) -> MachineModel:
    decode, prefill = parts.lora_decode.record.fit.plane, parts.lora_prefill.record.fit.plane
    invocation = parts.invocation
    model = MachineModel(
        num_layers=subject.shape.num_layers,
        step_s=parts.steps.prefill_s,
        groups=tuple(
            GroupModel(shape.name, base_s, shape.width)
            for shape, base_s in zip(parts.groups, parts.base.base_s, strict=True)
        ),
        invocation_s=0.0 if invocation is None else invocation.fixed_s,
        lora=LoraModel(
            decode_s_per_byte=decode.slopes[0],
            decode_fixed_s=decode.intercept,
            prefill_s_per_token_byte=prefill.slopes[0],
            prefill_fixed_s=prefill.intercept,
            prefill_s_per_token=prefill.slopes[1],
            prefill_s_per_byte=prefill.slopes[2],
        ),
        link=parts.link.model,
        num_workers=parts.num_workers,
        invocation_s_per_token=0.0 if invocation is None else invocation.s_per_token,
        assisted_pass_s=0.0 if invocation is None else invocation.pass_s,
        contention=0.0 if invocation is None else invocation.contention,
        job=parts.deltas.job
        if invocation is None
        else replace(parts.deltas.job, member_s=invocation.member_s, share_s=invocation.member_s),
    )
    steps = parts.steps
    return with_steps(
        model, steps.record.fit.plane, steps.prefill_s, steps.decode_s, steps.typical_over_fastest
    )

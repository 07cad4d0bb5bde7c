"""Fits a profile, for routers and simulations, to the measured times of a server. Pure.

The cost of adapters is fitted to total times, with the base model's part known. Kernels of other
engines pad, so every row of a batch costs as much as its largest adapter.
"""

from dataclasses import dataclass, field

from ....profiles.curve import Curve, median
from ....profiles.derive import min_group_bytes
from ....profiles.fit import fit_line, fit_with_held_out
from ....profiles.models import LinkModel, LoraModel, MachineModel
from ....profiles.profile import (
    FitRecord,
    Machine,
    ModelShape,
    Profile,
    Quality,
    RankBudget,
    Settings,
    Subject,
)
from ....profiles.server import BaseModel, MeasuredServer

_OFF = "the server was measured from outside"
_MAX_LINK_BYTES_PER_S = 1e12  # if load times do not grow with bytes


Repeated = dict[int, list[float]]  # seconds of each repetition, by case


@dataclass(frozen=True, slots=True)
class ServerTimes:
    """The measured times of one server; a part that is not measured yet is empty."""

    prefill: Repeated = field(default_factory=dict)  # by tokens
    decode: Repeated = field(default_factory=dict)  # by rows
    long_decode: Repeated = field(default_factory=dict)  # by rows, with longer prompts
    lora_prefill: dict[int, Repeated] = field(default_factory=dict)  # by rank, and tokens
    lora_decode: dict[int, Repeated] = field(default_factory=dict)  # by rank, and rows
    load: Repeated = field(default_factory=dict)  # by rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Prompt lengths of the decode measurements, in tokens."""

    short_tokens: int
    long_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Notes:
    """Notes in a profile about its measurement."""

    corun_version: str
    created_at: str
    measured_s: float
    is_thorough: bool
    busy_reasons: tuple[str, ...]


def compose_server(
    times: ServerTimes, sizes: Sizes, base: BaseModel, server: MeasuredServer, notes: Notes
) -> Profile:
    """Return the profile. Raises ``ValueError`` if there are too few cases for a fit."""
    prefill_s = Curve.rising(_medians(times.prefill))
    decode_s = Curve.rising(_medians(times.decode))
    keys = _keys_fit(times, sizes, decode_s)
    prefill_fit, decode_fit = _lora_fits(times, base, prefill_s, decode_s)
    link = _link(times, base)
    per_key_s = keys.fit.plane.slopes[1]
    decode_plane, prefill_plane = decode_fit.fit.plane, prefill_fit.fit.plane
    model = MachineModel(
        num_layers=base.num_layers,
        step_s=prefill_s,
        groups=(),
        invocation_s=0.0,
        lora=LoraModel(
            decode_s_per_byte=decode_plane.slopes[1],
            decode_fixed_s=decode_plane.intercept,
            prefill_s_per_token_byte=prefill_plane.slopes[1],
            prefill_fixed_s=prefill_plane.intercept,
            prefill_s_per_token=prefill_plane.slopes[2],
            prefill_s_per_byte=prefill_plane.slopes[3],
            is_padded=True,
        ),
        link=link,
        num_workers=0,
        tokens_per_worker=0,
        decode_step_s=_without_keys(decode_s, per_key_s, sizes.short_tokens),
        decode_s_per_key=per_key_s,
    )
    ranks = sorted(times.load)
    return Profile(
        subject=_subject(base, server, notes),
        created_at=notes.created_at,
        is_thorough=notes.is_thorough,
        model=model,
        min_group_bytes=min_group_bytes(link),
        coexecution_off=_OFF,
        reference_rank=ranks[-1],
        budgets=tuple(RankBudget(rank, rank * base.adapter_bytes_per_rank, 0) for rank in ranks),
        deltas=(),
        delta_points=(),
        step_fit=keys,
        decode_fit=decode_fit,
        prefill_fit=prefill_fit,
        link_points=(),
        quality=Quality(notes.busy_reasons, ()),
        measured_s=notes.measured_s,
        free_bytes=server.seen.kv_tokens * base.kv_bytes_per_token,
        server=server,
    )


def _medians(values: Repeated) -> dict[float, float]:
    return {float(key): median(repeated) for key, repeated in values.items()}


def _keys_fit(times: ServerTimes, sizes: Sizes, decode_s: Curve) -> FitRecord:
    """Fit steps against those of as many rows with short prompts, and additional keys."""
    points, y = [], []
    for measured, context in (
        (times.decode, sizes.short_tokens), (times.long_decode, sizes.long_tokens)
    ):  # fmt: skip
        for rows, repeated in measured.items():
            beyond = float(rows * (context - sizes.short_tokens))
            points.append((decode_s.at(rows), beyond))
            y.append(median(repeated))
    return FitRecord(fit_with_held_out(points, y, num_known=1), tuple(points), tuple(y))


def _lora_fits(
    times: ServerTimes, base: BaseModel, prefill_s: Curve, decode_s: Curve
) -> tuple[FitRecord, FitRecord]:
    """Fit prefill against tokens x bytes, tokens and bytes, and decode against rows x bytes."""
    points, y = [], []
    for rank, by_tokens in times.lora_prefill.items():
        num_bytes = float(rank * base.adapter_bytes_per_rank)
        for tokens, repeated in by_tokens.items():
            points.append((prefill_s.at(tokens), tokens * num_bytes, float(tokens), num_bytes))
            y.append(median(repeated))
    prefill = FitRecord(fit_with_held_out(points, y, num_known=1), tuple(points), tuple(y))
    rows_points, rows_y = [], []
    for rank, by_rows in times.lora_decode.items():
        num_bytes = float(rank * base.adapter_bytes_per_rank)
        for rows, repeated in by_rows.items():
            rows_points.append((decode_s.at(rows), rows * num_bytes))
            rows_y.append(median(repeated))
    fit = fit_with_held_out(rows_points, rows_y, num_known=1)
    return prefill, FitRecord(fit, tuple(rows_points), tuple(rows_y))


def _link(times: ServerTimes, base: BaseModel) -> LinkModel:
    """Fit the load from file to device, which a client sees as one time."""
    loads = _medians(times.load)
    line = fit_line([rank * base.adapter_bytes_per_rank for rank in loads], list(loads.values()))
    return LinkModel(1.0 / max(line.slope, 1.0 / _MAX_LINK_BYTES_PER_S), line.intercept)


def _without_keys(curve: Curve, s_per_key: float, context_tokens: int) -> Curve:
    rest = {x: max(0.0, y - s_per_key * x * context_tokens) for x, y in zip(
        curve.x, curve.y, strict=True
    )}  # fmt: skip
    return Curve.rising(rest)


def _subject(base: BaseModel, server: MeasuredServer, notes: Notes) -> Subject:
    return Subject(
        machine=Machine("not seen from outside", 0, f"{server.kind} {server.seen.version}"),
        settings=Settings(0, False, 1.0, "none", "as adapters are loaded", ()),
        shape=ModelShape(base.num_layers, base.dtype, (), base.kv_bytes_per_token),
        torch_version="",
        corun_version=notes.corun_version,
    )

"""Batches of LoRA segments, the plain loop that is the truth, and the tolerance of each type."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from corun.gpu.forward.batch import LoraBatch
from corun.gpu.lora.base import LoraBackend
from corun.gpu.lora.table import DeviceAdapter, LoraTable

TARGET = 2
NUM_TARGETS = 4
SCALING = 0.75


@dataclass(frozen=True)
class LoraCase:
    """ranks[i] None: adapter i does not have the target. Segments: (start, end, adapter)."""

    name: str
    in_features: int
    out_features: int
    ranks: tuple[int | None, ...]
    segments: tuple[tuple[int, int, int], ...]
    num_tokens: int


def _zipf_segments(num_tokens: int, num_adapters: int) -> tuple[tuple[int, int, int], ...]:
    shares = torch.tensor([1 / (k + 1) for k in range(num_adapters)])
    generator = torch.Generator().manual_seed(3)
    drawn = torch.multinomial(shares, num_tokens, replacement=True, generator=generator)
    counts = torch.bincount(drawn, minlength=num_adapters).tolist()
    segments, start = [], 0
    for adapter, count in enumerate(counts):
        if count:
            segments.append((start, start + count, adapter))
            start += count
    return tuple(segments)


def _ones(adapters: Sequence[int], gap: int = 0) -> tuple[tuple[int, int, int], ...]:
    return tuple((i * (1 + gap), i * (1 + gap) + 1, a) for i, a in enumerate(adapters))


CASES = (
    LoraCase("distinct", 64, 48, (8, 16, 32, 64, 128, 256, 8, 16), _ones(range(8)), 8),
    LoraCase("identical", 64, 80, (16,), _ones([0] * 6, gap=1), 12),
    LoraCase("skewed", 128, 64, (8,) * 7 + (128,), _ones(range(8)), 8),
    LoraCase("zipf", 96, 160, (8, 4, 64, 2, 16, 32), _zipf_segments(60, 6), 64),
    LoraCase("odd", 37, 29, (1, 3, 17), ((1, 2, 2), (2, 5, 0), (9, 22, 1)), 23),
    LoraCase("missing target", 64, 48, (8, None, 5), ((0, 2, 1), (2, 3, 0), (4, 8, 2)), 9),
    LoraCase("only missing", 64, 48, (None,), ((0, 3, 0),), 4),
    LoraCase("long", 112, 144, (64, 3, 256, 8), ((2, 302, 0), (302, 315, 1), (320, 321, 2)), 330),
    LoraCase("many groups", 64, 1040, (24, 8), ((0, 9, 1), (9, 14, 0)), 14),
)


def make_batch(segments: Sequence[tuple[int, int, int]], table: LoraTable, rows: Sequence[int]) -> LoraBatch:
    """A batch over adapters with the table rows ``rows``."""
    starts = tuple(start for start, _, _ in segments)
    ends = tuple(end for _, end, _ in segments)
    table_rows = tuple(rows[adapter] for _, _, adapter in segments)

    def tensor(values: tuple[int, ...]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=table.device)

    return LoraBatch(
        segment_starts=tensor(starts),
        segment_ends=tensor(ends),
        table_rows=tensor(table_rows),
        segment_starts_host=starts,
        segment_ends_host=ends,
        table_rows_host=table_rows,
        max_piece_tokens=max(e - s for s, e in zip(starts, ends, strict=True)),
        max_rank=max(int(table.host_ranks[row].max()) for row in table_rows),
    )


def check_case(
    case: LoraCase,
    make_backend: Callable[[LoraTable], LoraBackend],
    dtype: torch.dtype,
    device: str = "cpu",
    seed: int = 0,
) -> None:
    """Run ``case`` and compare with a float64 loop; tokens outside segments keep their bits."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    table = LoraTable(NUM_TARGETS, len(case.ranks) + 1, device)
    backend = make_backend(table)
    matrices: list[tuple[torch.Tensor, torch.Tensor] | None] = []
    rows = []
    for rank in case.ranks:
        # Every adapter has another target, of another rank, and its matrices must not be read.
        targets = {0: backend.pack(draw(5, case.in_features), draw(case.out_features, 5), 9.0)}
        pair = None
        if rank is not None:
            pair = (draw(rank, case.in_features), draw(case.out_features, rank))
            targets[TARGET] = backend.pack(*pair, SCALING)
        matrices.append(pair)
        rows.append(table.add(DeviceAdapter(targets)))
    table.upload()
    x = draw(case.num_tokens, case.in_features)
    y = draw(case.num_tokens, case.out_features)
    before = y.clone()
    backend.add_delta(x, y, TARGET, make_batch(case.segments, table, rows))

    covered = torch.zeros(case.num_tokens, dtype=torch.bool)
    eps = torch.finfo(dtype).eps
    for start, end, adapter in case.segments:
        pair = matrices[adapter]
        if pair is None:
            continue
        covered[start:end] = True
        a, b = pair[0].double(), pair[1].double()
        part = x[start:end].double()
        truth = before[start:end].double() + SCALING * (part @ a.t()) @ b.t()
        # Sums of absolute values bound what float32 accumulation may lose.
        magnitude = before[start:end].double().abs() + part.abs() @ a.abs().t() @ b.abs().t()
        allowed = (0 if dtype == torch.float32 else eps / 2) * truth.abs() + 4e-7 * magnitude
        error = (y[start:end].double() - truth).abs()
        excess = (error - allowed).max().item()
        assert excess <= 0, f"{case.name}, segment {start}..{end}: {excess} over the tolerance"
    integer = {2: torch.int16, 4: torch.int32}[y.element_size()]
    same = y.view(integer).cpu()[~covered] == before.view(integer).cpu()[~covered]
    assert bool(same.all()), f"{case.name}: tokens outside all segments changed"


def check_factors(
    make_backend: Callable[[LoraTable], LoraBackend],
    dtype: torch.dtype,
    device: str = "cpu",
    *,
    num_tokens: int = 7,
) -> None:
    """Adapters with factors on one of two targets, beside one without; against a float64 loop."""
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    widths, in_features = (48, 37), 64
    table = LoraTable(2, 3, device)
    backend = make_backend(table)
    a, bs = draw(8, in_features), [draw(width, 8) for width in widths]
    factors = [torch.randn(2, width, generator=generator).to(device) for width in widths]
    scaled = [{0}, set(), {0, 1}]  # targets with factors, by adapter
    rows = []
    for targets in scaled:
        packed = {index: backend.pack(a, b, SCALING) for index, b in enumerate(bs)}
        packed |= {index: replace(packed[index], factors=factors[index]) for index in targets}
        rows.append(table.add(DeviceAdapter(packed)))
    table.upload()
    third = num_tokens // 3
    segments = ((0, third, 0), (third, 2 * third, 1), (2 * third, num_tokens - 1, 2))
    x, ys = draw(num_tokens, in_features), [draw(num_tokens, width) for width in widths]
    before = [y.clone() for y in ys]
    for only, wanted in (((1,), False), ((0,), True)):
        batch = make_batch([(0, 1, adapter) for adapter in only], table, rows)
        assert backend.table.has_factors(batch.table_rows_host) is wanted
    backend.add_deltas(x, ys, (0, 1), make_batch(segments, table, rows))
    for index, (y, old) in enumerate(zip(ys, before, strict=True)):
        delta = SCALING * (x.double() @ a.double().t()) @ bs[index].double().t()
        truth, before_factors = old.double(), old.double().abs()
        for start, end, adapter in segments:
            part = truth[start:end] + delta[start:end]
            if index in scaled[adapter]:
                before_factors[start:end] = (part * factors[index][0].double()).abs()
                part = part * factors[index][0].double() + factors[index][1].double()
            truth[start:end] = part
        # Both the sum and the scaled sum may be rounded.
        eps = max(torch.finfo(dtype).eps, 1e-6)
        assert bool(((y - truth).abs() <= eps * (before_factors + truth.abs() + 100)).all())
        assert torch.equal(y[-1], old[-1]), "a token of no segment changed"


def check_group(
    make_backend: Callable[[LoraTable], LoraBackend],
    dtype: torch.dtype,
    *,
    in_features: int = 64,
    max_rank: int = 130,
) -> None:
    """Targets of one x together, and alone; their ys are tensors, or columns of one."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    widths = (80, 16, 29)
    table = LoraTable(4, 3, "cpu")
    backend = make_backend(table)
    # Targets 3, 0 and 2 of the table; the second adapter lacks one, the third has only another.
    held = [{3: 8, 0: 24, 2: 5}, {3: 3, 2: max_rank}, {1: 8}]
    rows = [
        table.add(
            DeviceAdapter(
                {
                    target: backend.pack(draw(rank, in_features), draw(width, rank), 0.5 + target)
                    for target, width in zip((3, 0, 2, 1), (*widths, 7), strict=True)
                    for rank in [ranks.get(target)]
                    if rank is not None
                }
            )
        )
        for ranks in held
    ]
    batch = make_batch([(0, 1, 1), (1, 12, 0), (12, 13, 2), (14, 16, 1)], table, rows)
    x = draw(17, in_features)
    before = draw(17, sum(widths))
    expected = [y.clone() for y in before.split(widths, dim=1)]
    for y, target in zip(expected, (3, 0, 2), strict=True):
        backend.add_delta(x, y, target, batch)
    whole = before.clone()
    for ys in ([y.clone() for y in before.split(widths, dim=1)], whole.split(widths, dim=1)):
        backend.add_deltas(x, ys, (3, 0, 2), batch)
        for y, alone in zip(ys, expected, strict=True):
            # Sums of another order where the work is cut elsewhere.
            rtol = torch.finfo(dtype).eps if dtype != torch.float32 else 1e-5
            torch.testing.assert_close(y, alone, rtol=rtol, atol=1e-3)

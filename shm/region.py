"""The format of a region: one (layer, input group) of one adapter in the host arena.

A region starts at a multiple of 64 bytes and is copied as a whole. All fields are little-endian.

  byte 0    header, 64 bytes: magic, version, item bytes, number of targets, width of x, bytes
            of the region
  byte 64   one line of 64 bytes per target, in the group's order (q, k, v): rank, byte offsets of
            its matrices A and B, padded columns of y, scaling, byte offset of its factors or 0,
            byte offset of its rows of tokens or 0, their number, tokens of its vocabulary or 0
  then      the matrices as ``cpu_workers.kernels.simd.layout`` packs them, and the factors, float32
            [2, columns of y without padding] (see ``gpu.lora.factors``), each at a multiple of 64
  at last   of a target with a vocabulary, at a multiple of 64 each: the tokens of its rows, int32,
            ascending, and the rows, of the matrices' type

Offsets count from the region's first byte. A target of rank 0 has no matrices; its columns of y
are zeros. The y of a group is [tokens, sum of all padded columns], targets side by side.

Knows nothing of the arena or of adapters' names.
"""

import functools
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace

from .errors import FormatError

ALIGNMENT_BYTES = 64
HEADER_BYTES = 64
TARGET_BYTES = 64
VERSION = 3
TOKEN_BYTES = 4
RANKS_PER_TILE = 8  # of A, as it is packed
MAX_TARGETS = 16  # of one input group; gate and up, or q, k and v, have two or three

_MAGIC = b"corunreg"
_HEADER = struct.Struct("<8sHHIqq32x")  # magic, version, item bytes, targets, width of x, bytes
# Rank, offsets of A and B, columns of y, scaling, factors, rows of tokens, their number, tokens.
_TARGET = struct.Struct("<qqqqf4xqqii")
_FLOAT32 = struct.Struct("<f")
_NUM_TARGETS, _NUM_TARGETS_OFFSET = struct.Struct("<I"), 12
assert _HEADER.size == HEADER_BYTES and _TARGET.size == TARGET_BYTES

# For compiled readers: fields of a target's line in words of 8 bytes. The scaling is the float32 at
# the start of the fifth word.
RANK_WORD, A_WORD, B_WORD, COLUMNS_WORD, SCALING_WORD = range(5)


@dataclass(frozen=True, slots=True)
class TargetSize:
    """One target before it is placed.

    ``padded_columns``: width of its part of y. ``a_bytes`` and ``b_bytes``: of the packed
    matrices, 0 if ``rank`` is 0. ``factor_bytes``: 0 = it has no factors. ``row_bytes``: of one of
    ``num_rows`` rows of tokens. ``num_tokens``: of the vocabulary of a target that may have rows.
    """

    rank: int
    padded_columns: int
    scaling: float
    a_bytes: int
    b_bytes: int
    factor_bytes: int = 0
    row_bytes: int = 0
    num_rows: int = 0
    num_tokens: int = 0


@dataclass(frozen=True, slots=True)
class TargetPlace:
    """One target of a region; offsets in bytes from the region's start.

    Those of A and B are 0 if ``rank`` is 0.
    """

    rank: int
    a_offset: int
    b_offset: int
    padded_columns: int
    scaling: float
    factor_offset: int = 0  # 0 = it has no factors
    rows_offset: int = 0  # of the tokens of its rows, which the rows follow; 0 = it has none
    num_rows: int = 0
    num_tokens: int = 0  # 0 = it has no vocabulary of its own

    @property
    def is_empty(self) -> bool:
        """Whether the adapter does not change this target."""
        return not (self.rank or self.num_tokens)


@dataclass(frozen=True, slots=True)
class Region:
    """The contents of a region's header.

    ``in_features``: width of x, without padding. ``item_bytes``: of one value of A and B, 2
    (bfloat16) or 4 (float32).
    """

    in_features: int
    item_bytes: int
    num_bytes: int
    targets: tuple[TargetPlace, ...]

    @property
    def matrix_bytes(self) -> int:
        """Bytes up to the rows of tokens."""
        return min((t.rows_offset for t in self.targets if t.rows_offset), default=self.num_bytes)

    @property
    def y_columns(self) -> int:
        """Width of y: the padded columns of all targets."""
        return sum(target.padded_columns for target in self.targets)

    @property
    def padded_ranks(self) -> int:
        """Ranks of all targets, each in whole tiles: the width of the hidden values."""
        return sum(-(-target.rank // RANKS_PER_TILE) * RANKS_PER_TILE for target in self.targets)

    @property
    def rank_sum(self) -> int:
        """Ranks of all targets together: the cost of the shrink per token and input."""
        return sum(target.rank for target in self.targets)


def plan_region(in_features: int, item_bytes: int, targets: Sequence[TargetSize]) -> Region:
    """Place every matrix behind the header. Pure; equal sizes give equal regions."""
    assert in_features > 0 and item_bytes in {2, 4}, (in_features, item_bytes)
    assert 0 < len(targets) <= MAX_TARGETS, len(targets)
    end = HEADER_BYTES + len(targets) * TARGET_BYTES
    places = []
    for target in targets:
        assert target.rank >= 0 and target.padded_columns > 0, target
        (scaling,) = _FLOAT32.unpack(_FLOAT32.pack(target.scaling))  # as readers see it
        a_offset = b_offset = factor_offset = 0
        if target.rank:
            a_offset = aligned(end)
            b_offset = aligned(a_offset + target.a_bytes)
            end = b_offset + target.b_bytes
            factor_offset = aligned(end) if target.factor_bytes else 0
            end = max(end, factor_offset + target.factor_bytes)
        else:
            assert target.a_bytes == target.b_bytes == target.factor_bytes == 0, target
        places.append(
            TargetPlace(
                target.rank,
                a_offset,
                b_offset,
                target.padded_columns,
                scaling,
                factor_offset,
                0,
                target.num_rows,
                target.num_tokens,
            )
        )
    for index, target in enumerate(targets):
        if target.num_rows:
            places[index] = replace(places[index], rows_offset=aligned(end))
            end = aligned(end) + rows_bytes(target.num_rows, target.row_bytes)
    return Region(in_features, item_bytes, aligned(end), tuple(places))


def rows_bytes(num_rows: int, row_bytes: int) -> int:
    """Bytes of rows of tokens, with the tokens before them."""
    return row_start(num_rows) + aligned(num_rows * row_bytes)


def row_start(num_rows: int) -> int:
    """Bytes of the tokens before the first of so many rows."""
    return aligned(TOKEN_BYTES * num_rows)


def write_header(region: Region, buffer: memoryview) -> None:
    """Write the header of a region that starts at ``buffer``'s first byte."""
    _HEADER.pack_into(
        buffer,
        0,
        _MAGIC,
        VERSION,
        region.item_bytes,
        len(region.targets),
        region.in_features,
        region.num_bytes,
    )
    for index, target in enumerate(region.targets):
        _TARGET.pack_into(
            buffer,
            HEADER_BYTES + index * TARGET_BYTES,
            target.rank,
            target.a_offset,
            target.b_offset,
            target.padded_columns,
            target.scaling,
            target.factor_offset,
            target.rows_offset,
            target.num_rows,
            target.num_tokens,
        )


def header_bytes(region: Region) -> bytes:
    """What ``write_header`` writes."""
    header = bytearray(HEADER_BYTES + len(region.targets) * TARGET_BYTES)
    write_header(region, memoryview(header))
    return bytes(header)


def read_header(buffer: memoryview) -> Region:
    """Read the header of the region that starts at ``buffer``'s first byte.

    ``buffer`` may be longer than the region. Raises ``FormatError`` if there is no region, or if
    its header exceeds ``buffer`` or its matrices exceed it.
    """
    if len(buffer) < HEADER_BYTES:
        raise FormatError(f"a region needs {HEADER_BYTES} bytes; {len(buffer)} are left")
    (num_targets,) = _NUM_TARGETS.unpack_from(buffer, _NUM_TARGETS_OFFSET)
    lines_bytes = min(num_targets, MAX_TARGETS) * TARGET_BYTES
    region = _parse(bytes(buffer[: HEADER_BYTES + lines_bytes]))
    if region.num_bytes > len(buffer):
        raise FormatError(f"a region of {region.num_bytes} bytes does not fit {len(buffer)}")
    return region


# All layers of an adapter have the same header, and workers read one per job.
@functools.lru_cache(maxsize=1024)
def _parse(header: bytes) -> Region:
    magic, version, item_bytes, num_targets, in_features, num_bytes = _HEADER.unpack_from(header)
    if magic != _MAGIC or version != VERSION:
        raise FormatError(f"no region of version {VERSION} starts here: {magic!r}, {version}")
    matrices_start = HEADER_BYTES + num_targets * TARGET_BYTES
    is_sound = 0 < num_targets <= MAX_TARGETS and item_bytes in {2, 4} and in_features > 0
    if not is_sound or not matrices_start <= min(num_bytes, len(header)):
        raise FormatError(
            f"a region's header is not valid: {num_targets} targets of {item_bytes} bytes a "
            f"value, width {in_features}, {num_bytes} bytes"
        )
    targets = []
    for index in range(num_targets):
        line = _TARGET.unpack_from(header, HEADER_BYTES + index * TARGET_BYTES)
        target = TargetPlace(*line)
        inside = all(
            matrices_start <= offset < num_bytes
            for offset in (target.a_offset, target.b_offset, target.factor_offset or target.b_offset)
        )
        has_rows = target.num_rows == 0 or matrices_start <= target.rows_offset < num_bytes
        if (
            min(target.rank, target.num_rows, target.num_tokens) < 0
            or target.padded_columns <= 0
            or (target.rank > 0 and not inside)
            or not has_rows
        ):
            raise FormatError(f"target {index} of a region is not valid: {line}")
        targets.append(target)
    return Region(in_features, item_bytes, num_bytes, tuple(targets))


def aligned(num_bytes: int) -> int:
    """Bytes rounded up to whole cache lines."""
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES

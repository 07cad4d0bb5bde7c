"""Reads the experts of gpt-oss as published (mxfp4).

Of each expert's matrix [out, in], 32 neighbours along the input share a power of two. Their codes
are floats of 4 bits, two a byte, the first in the lower half. The model has these matrices
transposed. All values are exact in bfloat16, if they are in its range.
"""

from dataclasses import dataclass

import torch

from .full_files import Found, StoredMatrix, check_finite, unreadable
from .weight_files import WeightFiles

_CODES, _SCALES = "_blocks", "_scales"  # after the name of the parameter
_BLOCK_BYTES = 16  # of 32 codes
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = torch.tensor([*_MAGNITUDES, *(-one for one in _MAGNITUDES)])
_BIAS, _NOT_A_NUMBER = 127, 255  # of the exponents


def find_packed_experts(files: WeightFiles) -> Found:
    """All experts in mxfp4. Raises ``ModelError``."""
    matrices: dict[str, StoredMatrix] = {}
    parts = set()
    for name in files.names:
        if files.dtype(name) != "U8" or not name.endswith(_CODES):
            continue
        parameter = name.removesuffix(_CODES)
        codes, scales = files.shape(name), files.shape(f"{parameter}{_SCALES}")
        assert codes is not None
        if len(codes) != 4 or codes[3] != _BLOCK_BYTES or scales != codes[:3] or 0 in codes:
            raise unreadable(
                parameter, f"its codes are {list(codes)}, its scales {scales and list(scales)}; "
                f"they must be [experts, out, in / 32, {_BLOCK_BYTES}] and [experts, out, in / 32]",
            )  # fmt: skip
        if files.dtype(f"{parameter}{_SCALES}") != "U8":
            raise unreadable(parameter, "its scales are not bytes")
        matrices[parameter] = _Experts(files, parameter)
        parts |= {name, f"{parameter}{_SCALES}"}
    return Found(matrices, frozenset(parts))


@dataclass(frozen=True, slots=True)
class _Experts:
    """Implements ``StoredMatrix``: [experts, in, out]."""

    files: WeightFiles
    name: str
    dtype: torch.dtype = torch.bfloat16

    @property
    def shape(self) -> tuple[int, ...]:
        codes = self.files.shape(f"{self.name}{_CODES}")
        assert codes is not None
        return codes[0], codes[2] * 2 * _BLOCK_BYTES, codes[1]

    def read(self, start: int, stop: int) -> torch.Tensor:
        found = torch.empty((stop - start, *self.shape[1:]), dtype=self.dtype)
        for expert in range(start, stop):
            one = slice(expert, expert + 1)
            codes = self.files.read(f"{self.name}{_CODES}", one)[0]  # [out, in / 32, 16]
            exponents = self.files.read(f"{self.name}{_SCALES}", one)[0].int()
            if int(exponents.max()) == _NOT_A_NUMBER:
                raise unreadable(self.name, "it has scales that are no numbers (255)")
            halves = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)
            values = torch.ldexp(_VALUES[halves.int()], (exponents - _BIAS)[..., None])
            target = found[expert - start]
            target.copy_(values.flatten(-2).T)
            check_finite(self.name, target)
        return found

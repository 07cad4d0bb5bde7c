"""Run by tests in a process of its own: the counting kernel of ``gpu_check``, interpreted."""

import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))


def main() -> None:
    """Print what each way of passing memory counts; three of the first 1500 words are wrong."""
    from gpu_checks.triton_count import count_kernel

    values = torch.full((2048,), 7, dtype=torch.int32)
    values[torch.tensor([0, 1024, 1499, 1500])] = 8  # the last one lies outside
    found = {}
    for name, source, is_address, is_volatile in (
        ("tensor", values, False, False),
        ("address", values.data_ptr(), True, False),
        ("volatile", values, False, True),
    ):
        errors = torch.zeros(1, dtype=torch.int32)
        count_kernel[(2,)](
            source, 7, errors, 1500, block=1024, is_address=is_address, is_volatile=is_volatile
        )
        found[name] = int(errors.item())
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()

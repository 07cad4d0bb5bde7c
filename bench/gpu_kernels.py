"""Are the engine's Triton kernels right in bf16 on a GPU, and how near do they come to its limits?

Attention (decode, prefill chunks) and LoRA products (decode with mixed ranks, prefill) at the
shapes of Llama 8B. Every setting is compared with float32 on the GPU within a stated tolerance, and
its time with the floor: bytes at the rate of a copy, operations at the rate of a matrix product,
both measured in the same process. Prints one JSON line last.

    python bench/gpu_kernels.py --out gpu_kernels.json
    python bench/gpu_kernels.py --device cpu      # the control flow only, tiny, torch's back ends
"""

import argparse
import sys
from pathlib import Path

from gpu_checks.importable import make_importable


def main() -> None:
    """Run all groups, or, for the process of one group, that group."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, help="file for the JSON line")
    parser.add_argument("--groups", default="", help="names by commas, such as 'LoRA decode'")
    parser.add_argument("--total-s", type=float, default=420.0, help="limit for all together")
    parser.add_argument("--commit", help="for the report, where the tree has no git")
    hidden = argparse.SUPPRESS
    parser.add_argument("--run", help=hidden)
    parser.add_argument("--kind", help=hidden)
    parser.add_argument("--limit-s", type=float, help=hidden)
    parser.add_argument("--figures", type=Path, help=hidden)
    options = parser.parse_args()
    importable = make_importable()
    if options.run:
        from gpu_checks.figures import Figures
        from gpu_checks.kernel_groups import run_group

        run_group(options.run, options.kind, options.limit_s, Figures(options.figures))
        return
    from gpu_checks.asking import choose
    from gpu_checks.kernel_session import GROUPS, KernelSession

    session = KernelSession(options.device, total_s=options.total_s, commit=options.commit)
    wanted = choose(parser, options.groups, GROUPS)
    sys.exit(not session.run(wanted, out=options.out, importable=importable))


if __name__ == "__main__":
    main()

"""Are the engine's Triton kernels right in bf16 on a GPU, and how near do they come to its limits?

Attention (decode, prefill chunks) and LoRA products (decode with mixed ranks, prefill) at the
shapes of Llama 8B. Every setting is compared with float32 on the GPU within a stated tolerance, and
its time with the floor: bytes at the rate of a copy, operations at the rate of a matrix product,
both measured in the same process. Prints one JSON line last.

    python bench/gpu_kernels.py --out gpu_kernels.json
    python bench/gpu_kernels.py --device cpu      # the control flow only, tiny, torch's back ends
"""

import sys

from gpu_checks.asking import choose, make_parser
from gpu_checks.importable import make_importable


def main() -> None:
    """Run all groups, or, for the process of one group, that group."""
    parser = make_parser(
        __doc__ or "", "groups", "names by commas, such as 'LoRA decode'", total_s=420.0
    )
    options = parser.parse_args()
    importable = make_importable()
    if options.run:
        from gpu_checks.figures import Figures
        from gpu_checks.kernel_groups import run_group

        run_group(options.run, options.kind, options.limit_s, Figures(options.figures))
        return
    from gpu_checks.kernel_session import GROUPS, KernelSession

    session = KernelSession(options.device, total_s=options.total_s, commit=options.commit)
    wanted = choose(parser, options.wanted, GROUPS)
    sys.exit(not session.run(wanted, out=options.out, importable=importable))


if __name__ == "__main__":
    main()

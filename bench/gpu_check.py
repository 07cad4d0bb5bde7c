"""Answers on a GPU what co-execution rests on and documentation leaves open.

Eight questions: registration of shared memory, coherence, round trips, ordering over a million
rounds, what goes on beside an outstanding wait, recovery from a lost worker, capture in graphs,
registered memory in Triton kernels; and the ceilings of the machine. Every question runs in a
process of its own with a time limit. Runs in under eight minutes, also where ``corun`` is not
installed, and prints one JSON line last.

    python bench/gpu_check.py --out gpu_check.json
    python bench/gpu_check.py --device cpu        # the control flow only, tiny
"""

import argparse
import sys
from pathlib import Path

from gpu_checks.importable import make_importable


def main() -> None:
    """Run everything, or, for the process of one question, that question."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, help="file for the JSON line")
    parser.add_argument("--questions", default="", help="numbers or 'ceilings', by commas")
    parser.add_argument("--total-s", type=float, default=455.0, help="limit for all together")
    parser.add_argument("--commit", help="for the report, where the tree has no git")
    hidden = argparse.SUPPRESS
    parser.add_argument("--run", help=hidden)
    parser.add_argument("--kind", help=hidden)
    parser.add_argument("--limit-s", type=float, help=hidden)
    parser.add_argument("--figures", type=Path, help=hidden)
    options = parser.parse_args()
    importable = make_importable()
    if options.run:
        from gpu_checks.questions import run_question

        run_question(options.run, options.kind, options.limit_s, options.figures)
        return
    from gpu_checks.asking import choose
    from gpu_checks.questions import QUESTIONS
    from gpu_checks.session import Session

    session = Session(options.device, total_s=options.total_s, commit=options.commit)
    wanted = choose(parser, options.questions, [question.name for question in QUESTIONS])
    sys.exit(not session.run(wanted, out=options.out, importable=importable))


if __name__ == "__main__":
    main()

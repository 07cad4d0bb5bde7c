"""Answers on a GPU what co-execution rests on and documentation leaves open.

Eight questions: registration of shared memory, coherence, round trips, ordering over a million
rounds, what goes on beside an outstanding wait, recovery from a lost worker, capture in graphs,
registered memory in Triton kernels; and the ceilings of the machine. Every question runs in a
process of its own with a time limit. Runs in under eight minutes, also where ``corun`` is not
installed, and prints one JSON line last.

    python bench/gpu_check.py --out gpu_check.json
    python bench/gpu_check.py --device cpu        # the control flow only, tiny
"""

import sys

from gpu_checks.asking import choose, make_parser
from gpu_checks.importable import make_importable


def main() -> None:
    """Run everything, or, for the process of one question, that question."""
    parser = make_parser(
        __doc__ or "", "questions", "numbers or 'ceilings', by commas", total_s=455.0
    )
    options = parser.parse_args()
    importable = make_importable()
    if options.run:
        from gpu_checks.questions import run_question

        run_question(options.run, options.kind, options.limit_s, options.figures)
        return
    from gpu_checks.questions import QUESTIONS
    from gpu_checks.session import Session

    session = Session(options.device, total_s=options.total_s, commit=options.commit)
    wanted = choose(parser, options.wanted, [question.name for question in QUESTIONS])
    sys.exit(not session.run(wanted, out=options.out, importable=importable))


if __name__ == "__main__":
    main()

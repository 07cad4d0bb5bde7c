"""The questions: what each is called, which kinds of signalling it is asked for, how long it may.

Run in a process of its own, a question is found by name in ``run_question``.
"""

from dataclasses import dataclass
from pathlib import Path

from gpu_checks.figures import Figures

WORDS = ("stream-op", "triton")
"""The ways to signal and wait that matter; the third, by the host, is the fallback of both."""


@dataclass(frozen=True, slots=True)
class Question:
    """One question; ``kinds`` on CUDA, each in a process of its own."""

    name: str
    title: str
    kinds: tuple[str, ...]
    limit_s: float  # per process
    why_not_on_cpu: str | None = None


QUESTIONS = (
    Question("1", "registration and asynchrony", WORDS[:1], 45),
    Question("2", "coherence of memory written after its mapping", WORDS[:1], 30),
    Question("3", "round trip device, worker, device", WORDS, 60),
    Question("5", "what goes on beside an outstanding wait", WORDS, 60),
    Question("6", "recovery when a peer is lost", WORDS, 60),
    Question("7", "capture of signal and wait in a graph", WORDS, 45, "the CPU has no graphs"),
    Question("8", "registered memory in Triton kernels", WORDS[:1], 60),
    Question("ceilings", "copy bandwidth, matrix rate, link", WORDS[:1], 45),
    # Last, because it takes what time is left; see ``Session``.
    Question("4", "payload before flag, a million rounds", WORDS, 130),
)


def run_question(name: str, kind: str, limit_s: float, path: Path) -> None:
    """Answer one question in this process; figures go to ``path`` as they come."""
    from gpu_checks import (
        ceilings,
        graphs,
        machine,
        memory_questions,
        ordering,
        outstanding,
        recovery,
        round_trips,
    )

    work = {
        "machine": machine.machine,
        "1": memory_questions.registration,
        "2": memory_questions.coherence,
        "3": round_trips.round_trips,
        "4": ordering.ordering,
        "5": outstanding.outstanding,
        "6": recovery.recovery,
        "hold": recovery.hold,
        "7": graphs.graph_capture,
        "8": memory_questions.triton_arguments,
        "ceilings": ceilings.ceilings,
    }
    work[name](kind, limit_s, Figures(path))

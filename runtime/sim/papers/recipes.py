"""Workloads of papers by name.

S1 is Chameleon's (section 5.1): lengths of Azure's conversations, Poisson arrivals, a hundred
adapters of five ranks in equal numbers, small ranks more popular by a power law. prod50 and those
below it are LoRAServe's (section V-E), with Azure's lengths in place of its own. toppings-S1 to -S6
are table 2 of Toppings.
"""

from collections.abc import Mapping
from dataclasses import replace

from ..workload_spec import AdapterSpec, ArrivalSpec, LengthSpec, Recipe, SessionSpec, WorkloadSpec

_TRACE = ArrivalSpec(process="trace")
_GENTD26 = AdapterSpec(popularity="gentd26")
_ZIPF = AdapterSpec(popularity="zipf", number=300)
_FIFTH = LengthSpec(prompt_divisor=5, output_divisor=5)
_SIXTEENTH = LengthSpec(prompt_divisor=16, output_divisor=16)
_OWN_CLOCK = WorkloadSpec(arrivals=_TRACE, adapters=_GENTD26)


def _conversations(prompt_divisor: int) -> WorkloadSpec:
    return WorkloadSpec(
        lengths=LengthSpec(source="mooncake", prompt_divisor=prompt_divisor, output_divisor=4),
        arrivals=_TRACE,
        adapters=AdapterSpec(popularity="zipf", ranks=(32, 64)),
    )


def _production(number: int) -> WorkloadSpec:
    """The k-th smallest rank with weight 1/k, and so the k-th adapter of a rank."""
    return WorkloadSpec(
        adapters=AdapterSpec(number=number, within_exponent=1.0), sessions=SessionSpec(follow_up_share=0.4)
    )


def _toppings(rank: int, rps: float, *, machine: str = "a100-llama2-7b") -> Recipe:
    """A request for one adapter after the other, with Azure's lengths, divided, for LMSYS's."""
    adapters = AdapterSpec(popularity="in-turn", number=200, ranks=(rank,))
    lengths = LengthSpec(prompt_divisor=16)
    return Recipe(machine, WorkloadSpec(rps=rps, lengths=lengths, adapters=adapters))


_A40_7B, _A40_8B, _TP4 = "a40-llama7b", "a40-llama8b", "tp4-llama7b-padded"
_TP4_70B = "tp4-llama70b-padded-scaled"
RECIPES: Mapping[str, Recipe] = {
    "S1": Recipe(_A40_7B, WorkloadSpec()),
    "S2": Recipe(_A40_7B, WorkloadSpec(lengths=_FIFTH)),
    "S3": Recipe(_A40_8B, _OWN_CLOCK),
    "S4": Recipe(_A40_7B, WorkloadSpec(lengths=LengthSpec(source="azure-code"), arrivals=_TRACE)),
    "S5": Recipe(_A40_7B, _OWN_CLOCK),
    "zipf": Recipe(_A40_8B, WorkloadSpec(lengths=_FIFTH, adapters=_ZIPF)),
    "gentd26": Recipe(_A40_8B, WorkloadSpec(lengths=_FIFTH, adapters=_GENTD26)),
    "mooncake-16": Recipe(_A40_7B, _conversations(16)),
    "mooncake-8": Recipe(_A40_7B, _conversations(8)),
    "maf": Recipe(_A40_7B, WorkloadSpec(arrivals=_TRACE, adapters=AdapterSpec(popularity="maf"))),
    "servegen": Recipe(
        _A40_8B,
        WorkloadSpec(
            lengths=LengthSpec(source="servegen-m-small"),
            arrivals=_TRACE,
            adapters=AdapterSpec(popularity="clients"),
        ),
    ),
    # For models that are small enough for a CPU.
    "S1-16": Recipe(_A40_7B, WorkloadSpec(lengths=_SIXTEENTH)),
    "S5-16": Recipe(_A40_7B, replace(_OWN_CLOCK, lengths=_SIXTEENTH)),
    "prod50": Recipe(_TP4, _production(50)),
    "prod100": Recipe(_TP4, _production(100)),
    "prod200": Recipe(_TP4, _production(200)),
    "uniform": Recipe(_TP4, WorkloadSpec(adapters=AdapterSpec(number=25, rank_exponent=0.0))),
    "exp": Recipe(_TP4, WorkloadSpec(adapters=AdapterSpec(number=25, rank_popularity="halving"))),
    "shifting": Recipe(_TP4, WorkloadSpec(adapters=AdapterSpec(number=25, rank_popularity="shifting"))),
    "toppings-S1": _toppings(32, 9.0),
    "toppings-S2": _toppings(64, 6.0),
    "toppings-S3": _toppings(64, 9.0),
    # Meetings of QMSum as embeddings: by hand, 10,000 tokens in a thirtieth.
    "toppings-S4": Recipe(
        "a100-llama2-7b",
        WorkloadSpec(
            rps=3.0,
            lengths=LengthSpec(source="fixed", prompt_tokens=333, output_tokens=100),
            adapters=AdapterSpec(popularity="in-turn", number=50, ranks=(256,)),
        ),
    ),
    "toppings-S5": _toppings(32, 3.0, machine=_TP4_70B),
    "toppings-S6": _toppings(64, 3.0, machine=_TP4_70B),
    "bursts": Recipe(_TP4, replace(_production(100), arrivals=ArrivalSpec(process="gamma", cv=3.0))),
}

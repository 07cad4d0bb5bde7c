"""Bounds of routers and placements by row, with their rates.

A capacity bound "A sustains k times the load of B" is judged at two rates, r and k r: see
``WithinSlo``. The rates were found once by ``routing.py --capacities``; each r is a little above
B's capacity. The default is 25 adapters per server.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from routes.bounds import Attainment, Bound, FewFiles, TailRatio, WithinSlo
from routes.settings import FUNCTIONS, Setting, production

PADDED, LIGHT, EXACT = (f"tp4-llama7b-{kernels}" for kernels in ("padded", "light", "exact"))
SLO_S: dict[str, float] = {PADDED: 10.0, LIGHT: 2.0, EXACT: 2.0}  # P95 of first tokens

# Requests/s, each a little more than what it is called after bears.
PADDED_P2C_RPS = 9.3
PADDED_RANDOM_RPS = 7.5  # random placement
PADDED_PREDICTED_RPS = 13.3  # with 4 servers
BEST_RPS: dict[str, float] = {LIGHT: 17.2, EXACT: 13.6}  # the best of all but ``predicted``
RANDOM_RPS: dict[str, float] = {LIGHT: 12.5, EXACT: 10.0}
SERVERS_FOR_24_RPS = 8  # with ``predicted``
TOPPINGS_RPS = {8: (30.0, 40.0, 50.0), 60: (340.0,)}  # section 7.4

# Tokens/s by rank that a server of PADDED bears with adapters of that rank alone, for ``sticky``.
POINTS = ((8, 8280.0), (16, 7520.0), (32, 6520.0), (64, 5140.0), (128, 3510.0))

OTHER_ROUTERS = ("p2c", "least-tokens", "toppings", "affinity", "random", "first-fit", "dlora")
RANK_EXPONENTS = (1 / 3, 1 / 2, 1.0, 2.0, 3.0)
_HEAVY = 0.85  # of what the best router bears
_FULL_SERVERS = (8, 60)
_MANY = 60
_SLOW_FACTOR = 4.0
_STORE_BYTES = 10 * 10**9  # four times the mean of 25 adapters, where files come from peers


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the issue's table: a figure of a paper, or a claim of ours."""

    name: str
    bounds: Sequence[Bound]
    is_full: bool = False  # is of 8 or 60 servers


def _setting(
    machine: str, router: str, rate_rps: float, num_servers: int = 4, placement: str | None = None
) -> Setting:
    return Setting(
        machine=machine,
        router=router,
        rate_rps=rate_rps,
        num_servers=num_servers,
        placement=placement,
        workload=production(25 * num_servers),
    )


_padded = partial(_setting, PADDED)


def _placed(machine: str, rate_rps: float, num_servers: int = 4) -> Setting:
    """As random placement has it: each adapter on one server, which gets all its requests."""
    return _setting(machine, "loraserve", rate_rps, num_servers, placement="random")


def _loraserve_17() -> Row:
    p2c_rps, random_rps = PADDED_P2C_RPS, PADDED_RANDOM_RPS
    return Row(
        "LoRAServe 17",
        (
            *(
                WithinSlo(
                    text=f"{router} bears >= {factor} x p2c",
                    slo_s=SLO_S[PADDED],
                    failing=(_padded("p2c", p2c_rps),),
                    holding=(_padded(router, factor * p2c_rps),),
                )
                for router, factor in (("toppings", 1.35), ("predicted", 1.2))
            ),
            WithinSlo(
                text="predicted bears >= 1.4 x random placement",
                slo_s=SLO_S[PADDED],
                failing=(_placed(PADDED, random_rps),),
                holding=(_padded("predicted", 1.4 * random_rps),),
            ),
        ),
    )


def _servers_for_24() -> Row:
    """The same hundred adapters, however many servers there are."""
    few, rate_rps = SERVERS_FOR_24_RPS, 24.0
    hundred = production(100)
    at_half, at_most = 2 * few - 1, math.ceil(few / 0.8) - 1
    return Row(
        "servers for 24 requests/s",
        (
            WithinSlo(
                text=f"predicted needs {few}, <= 0.5 of random placement and <= 0.8 of p2c",
                slo_s=SLO_S[PADDED],
                failing=(
                    replace(_placed(PADDED, rate_rps, at_half), workload=hundred),
                    replace(_padded("p2c", rate_rps, at_most), workload=hundred),
                ),
                holding=(replace(_padded("predicted", rate_rps, few), workload=hundred),),
            ),
        ),
    )


def _not_padded(machine: str) -> Row:
    best_rps, random_rps, slo_s = BEST_RPS[machine], RANDOM_RPS[machine], SLO_S[machine]
    bounds: list[Bound] = [
        WithinSlo(
            text="predicted bears >= 0.97 x the best of the others",
            slo_s=slo_s,
            failing=tuple(_setting(machine, router, best_rps) for router in OTHER_ROUTERS),
            holding=(_setting(machine, "predicted", 0.97 * best_rps),),
        ),
        WithinSlo(
            text="predicted bears >= 1.25 x random placement",
            slo_s=slo_s,
            failing=(_placed(machine, random_rps),),
            holding=(_setting(machine, "predicted", 1.25 * random_rps),),
        ),
    ]
    if machine == LIGHT:
        rate_rps = _HEAVY * best_rps
        bounds.append(
            TailRatio(
                text=f"P95 of predicted over p2c at {_HEAVY:.0%} load",
                a=_setting(machine, "predicted", rate_rps),
                b=_setting(machine, "p2c", rate_rps),
                most=0.85,
            )
        )
    return Row(machine, bounds)


def _loraserve_21(num_servers: int) -> Row:
    """Adapters and load in proportion to servers."""
    num_adapters = 1000 if num_servers == _MANY else 25 * num_servers
    rate_rps = 0.95 * num_servers / 4 * PADDED_PREDICTED_RPS
    setting = replace(_padded("predicted", rate_rps, num_servers), workload=production(num_adapters))
    return Row(
        f"LoRAServe 21, {num_servers} servers",
        (
            WithinSlo(
                text="predicted bears >= 0.95 of what is in proportion to 4 servers",
                slo_s=SLO_S[PADDED],
                failing=(_padded("predicted", PADDED_PREDICTED_RPS),),
                holding=(setting,),
            ),
        ),
        is_full=num_servers in _FULL_SERVERS,
    )


def _loraserve_22() -> Row:
    rate_rps = 0.8 * PADDED_PREDICTED_RPS
    return Row(
        "LoRAServe 22",
        (
            WithinSlo(
                text="predicted at 0.8 of its capacity, at any skew of ranks",
                slo_s=SLO_S[PADDED],
                holding=tuple(
                    replace(_padded("predicted", rate_rps), workload=production(100, exponent))
                    for exponent in RANK_EXPONENTS
                ),
            ),
        ),
    )


def _memory(num_servers: int) -> Row:
    num_adapters = 1000 if num_servers == _MANY else 25 * num_servers
    rate_rps = 0.8 * num_servers / 4 * PADDED_PREDICTED_RPS
    setting = replace(
        _padded("predicted", rate_rps, num_servers, placement="sticky"), workload=production(num_adapters)
    )
    return Row(
        f"memory, {num_servers} servers",
        (FewFiles(text="sticky: adapters of the largest server", setting=setting),),
        is_full=num_servers in _FULL_SERVERS,
    )


def _disturbed() -> Row:
    """12 servers, so that those that are not slow bear what the slow one does not."""
    usual = _setting(LIGHT, "predicted", 3 * _HEAVY * BEST_RPS[LIGHT], 12)
    stored = replace(usual, store_bytes=_STORE_BYTES)
    # As heavy for what servers bear where one is slow.
    slower = replace(usual, rate_rps=usual.rate_rps * (11 + 1 / _SLOW_FACTOR) / 12)
    return Row(
        "light, disturbed",
        tuple(
            TailRatio(text=f"P95 of predicted, {name}", a=a, b=b, most=most)
            for name, a, b, most in (
                ("states 0.3 s old", replace(usual, state_age_s=0.3), usual, 1.15),
                ("16 routers", replace(usual, num_routers=16), usual, 2.0),
                ("one server 4 x slower", replace(slower, slow_factor=_SLOW_FACTOR), slower, 1.3),
                (
                    "files from peers at 0.2 against 10 GB/s",
                    replace(stored, peer_bytes_per_s=0.2e9),
                    stored,
                    1.15,
                ),
            )
        ),
    )


def _toppings(name: str, num_servers: int) -> Row:
    def at(router: str, rate_rps: float) -> Setting:
        return Setting(
            machine="a100-llama2-7b",
            router=router,
            num_servers=num_servers,
            rate_rps=rate_rps,
            workload=FUNCTIONS,
        )

    loads = TOPPINGS_RPS[num_servers]
    return Row(
        name,
        (
            Attainment(
                text="time per token of toppings within its SLO",
                judged="toppings",
                by_router={
                    router: tuple(at(router, rate_rps) for rate_rps in loads)
                    for router in ("toppings", "dlora", "random", "first-fit")
                },
                without=replace(at("p2c", loads[0]), has_adapters=False),
            ),
        ),
        is_full=True,
    )


def rows() -> Sequence[Row]:
    """All of them, those that need few servers first."""
    return (
        _loraserve_17(),
        _servers_for_24(),
        _not_padded(LIGHT),
        _not_padded(EXACT),
        _loraserve_21(12),
        _loraserve_22(),
        _memory(4),
        _memory(12),
        _disturbed(),
        _toppings("Toppings 18", 8),
        _toppings("Toppings 19", 60),
        _loraserve_21(8),
        _loraserve_21(60),
        _memory(60),
    )


def capacities() -> dict[str, Setting]:
    """What the rates above are found from, at any rate, by name."""
    found = {
        "PADDED_P2C_RPS": _padded("p2c", 1.0),
        "PADDED_RANDOM_RPS": _placed(PADDED, 1.0),
        "PADDED_PREDICTED_RPS": _padded("predicted", 1.0),
        "toppings, PADDED": _padded("toppings", 1.0),
        **{
            f"loraserve, {machine}": _setting(machine, "loraserve", 1.0, placement="loraserve")
            for machine in (PADDED, EXACT)
        },
    }
    for machine in (LIGHT, EXACT):
        found |= {
            f"{router}, {machine}": _setting(machine, router, 1.0) for router in ("predicted", *OTHER_ROUTERS)
        }
        found[f"RANDOM_RPS, {machine}"] = _placed(machine, 1.0)
    return found

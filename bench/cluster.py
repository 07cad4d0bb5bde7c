"""What does a cluster add to its engines, in cost and benefit? Real gateways, controllers, agents.

    python bench/cluster.py [--parts gateway,sim,slow,fetch]

gateway  its latency to the first byte and its throughput: at most 1.5 ms at the median, at least
         1,000 requests and 40,000 streamed tokens per second. The gateway has one core; the client
         and engines that answer from memory have the others.
sim      12 engines on the real clock, four of them half as fast, against ``replay_cluster`` on the
         same requests: mean first token within 15 %, shares of requests within 3 points.
slow     one engine of 12 four times slower: the P95 of first tokens with the router ``predicted``
         not above that with ``p2c``, and at most 1.3 times that without a slow engine.
fetch    an adapter of 100 MB from one agent to another over loopback, warm: its bytes in at most
         150 ms, and with hashing and storing in at most 400 ms.

Engines of sim and slow are the real server and core over a simulated machine. The last line is
JSON. Nothing else may run on the machine.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "tests"))  # engines and agents that stand alone

from gateway.fetches import fetch_figures
from gateway.first_figures import first_figures
from gateway.live import sim_figures, slow_figures
from paired import report

_Part = Callable[[], tuple[dict[str, Any], dict[str, bool | None]]]
_PARTS: dict[str, _Part] = {
    "gateway": first_figures,
    "sim": sim_figures,
    "slow": slow_figures,
    "fetch": fetch_figures,
}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--parts", default=",".join(_PARTS), help="some of: " + ", ".join(_PARTS))
    names = parser.parse_args().parts.split(",")
    unknown = sorted(set(names) - set(_PARTS))
    if unknown:
        parser.error(f"there is no part {unknown[0]!r}")
    figures: dict[str, Any] = {}
    bounds: dict[str, bool | None] = {}
    for name in names:
        found, held = _PARTS[name]()
        figures |= found
        bounds |= held
    report("cluster", {"parts": names}, figures, bounds)


if __name__ == "__main__":
    main()

"""The benefits of single parts of co-execution."""

import json
import statistics
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from corun.profiles.profile import Profile
from paired import compare

from cold.cells import NUM_OUTPUT_TOKENS, cached_first_s
from cold.rig import CACHED, Rig, slowness_of
from cold.workload import Cell

QUARTER = 4.0
QUARTER_IN_PAPER = 1.17  # Toppings, section 7.2: first token with a quarter of the CPUs
_SOCKET_SCRIPT = Path(__file__).resolve().parent.parent / "invocation.py"

NO_SYNC_ABLATION = (
    "not applicable without CUDA: the CPU device's compute stream is the calling thread, so host "
    "and device never run apart, and there is no host synchronisation to leave out"
)


def quarter_of_the_cpu(rig: Rig, cell: Cell, num_pairs: int) -> dict[str, Any]:
    """First tokens of assisted requests with a worker four times as slow."""
    slowness = _set_up(rig, cell)

    def first_s(factor: float) -> float:
        rig.pool.slowdown = slowness * factor
        rig.prepare(cell.adapter, is_cold=True)
        rig.use("assisted")
        return rig.serve(rig.prompt(cell.prompt_tokens), cell.adapter, 1).first_s

    first_s(QUARTER), first_s(1.0)
    ratio, _, _ = compare(lambda: first_s(QUARTER), lambda: first_s(1.0), num_pairs)
    control, _, _ = compare(lambda: first_s(1.0), lambda: first_s(1.0), num_pairs)
    return {
        "cell": cell.label,
        "first_token_ratio": ratio.to_json(),
        "ratio_in_paper": QUARTER_IN_PAPER,
        "control": control.to_json(),
    }


def pipelined_over_cached(rig: Rig, cell: Cell, num_pairs: int) -> dict[str, Any]:
    """First tokens of pipelined requests, over cached ones."""
    _set_up(rig, cell)

    def first_s(*, is_cold: bool) -> float:
        rig.prepare(cell.adapter, is_cold=is_cold)
        rig.use("pipelined" if is_cold else CACHED)
        tokens = rig.prompt(cell.prompt_tokens)
        return rig.serve(tokens, cell.adapter, NUM_OUTPUT_TOKENS).first_s

    first_s(is_cold=True)
    ratio, cold, _ = compare(lambda: first_s(is_cold=True), lambda: first_s(is_cold=False), num_pairs)
    return {
        "layer_groups": rig.num_layer_groups(cell.adapter),
        "first_token_ms": round(statistics.median(cold) * 1e3, 2),
        "ratio_to_cached": ratio.to_json(),
    }


def with_one_layer_group(profile: Profile) -> Profile:
    """A profile by which an engine loads all layers of an adapter together."""
    return replace(profile, min_group_bytes=2**62)


def mailboxes_against_sockets(num_pairs: int) -> dict[str, Any]:
    """Microseconds of one invocation by shared memory and by socket: ``bench/invocation.py``."""
    done = subprocess.run(
        [
            sys.executable,
            str(_SOCKET_SCRIPT),
            "--receivers",
            "1",
            "--pairs",
            str(num_pairs),
            "--invocations",
            "300",
            "--rounds",
            "5000",
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        return {"error": done.stderr[-500:]}
    figures = json.loads(done.stdout.splitlines()[-1])["figures"]["1 receivers"]
    wanted = """
        mailbox_us socket_descriptor_us socket_payload_us mailbox_to_socket_descriptor
        mailbox_to_socket_payload control
    """.split()
    return {name: figures[name] for name in wanted}


def _set_up(rig: Rig, cell: Cell) -> float:
    """Link and workers of ``cell``; returns how much slower the workers are."""
    rig.set_up_free()
    rig.use(CACHED)
    prefill_s = cached_first_s(rig, cell.adapter, cell.prompt_tokens)
    slowness = slowness_of(rig, cell).worker_slowdown
    rig.set_up(rig.adapter_bytes(cell.adapter) / (cell.load_ratio * prefill_s), slowness)
    return slowness

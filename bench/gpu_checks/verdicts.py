"""A sentence per question, made of its figures alone. Pure."""

from collections.abc import Callable, Mapping
from typing import Any

Found = Mapping[str, Any]

ASYNCHRONOUS_US = 50.0


def verdict_of(name: str, by_kind: Mapping[str, Found], statuses: Mapping[str, str]) -> str:
    """What the figures of all kinds say; a kind that did not end is named with what it left."""
    parts = []
    for kind, found in by_kind.items():
        status = statuses[kind]
        try:
            text = _SENTENCES[name](found)
        except KeyError as missing:
            text = f"no verdict, {missing} was not measured"
        parts.append(f"{kind}: {text}" if status == "answered" else f"{kind} ({status}): {text}")
    return "; ".join(parts) + "."


def _registration(found: Found) -> str:
    parts = []
    for name, case in found.items():
        if not isinstance(case, Mapping):
            continue
        if "skipped" in case:
            parts.append(f"{name}: not available")
        elif not case["registered"]:
            parts.append(f"{name}: refused")
        else:
            is_fast = case["copy_call_us"] < ASYNCHRONOUS_US and case["was_queued"]
            pinned = {True: "pinned", False: "NOT pinned", None: "nothing to pin"}
            text = f"{name}: registered, {pinned[case['is_pinned']]}, copies are "
            text += "asynchronous" if is_fast else "NOT asynchronous"
            parts.append(f"{text} ({case['copy_call_us']} us a call)")
    if found["may_lock_without_limit"]:
        parts.append("the process may lock without limit, so the limit itself was not tested")
    return ", ".join(parts)


def _coherence(found: Found) -> str:
    is_seeing = found["planted_words"]["found"] == found["planted_words"]["planted"]
    if not is_seeing:
        return "the count of wrong words is blind"
    wrong = {name: number for name, number in found["wrong_words"].items() if number}
    text = f"wrong words {wrong}" if wrong else "coherent both ways"
    text += f" over {found['num_rounds']} rounds"
    same = found.get("device_address_is_host_address")
    if same is None:
        return text
    return f"{text}, device addresses are {'the' if same else 'NOT the'} host's"


def _round_trips(found: Found) -> str:
    parts = []
    for name in ("on an idle link", "beside copies to the device"):
        trip = found[name]["round_trip_us"]
        parts.append(f"{trip['p50']} us (99 %: {trip['p99']} us) {name}")
    loaded = found["beside copies to the device"]
    lasting, total = loaded["batches_loaded_to_their_end"], loaded["num_batches"]
    if lasting < total:
        parts.append(f"the load outlasted only {lasting} of {total} batches")
    return "a round trip takes " + ", ".join(parts)


def _ordering(found: Found) -> str:
    state = found["so_far"]
    parts, is_blind = [], False
    for name in ("to_worker", "to_device_zero_copy", "to_device_by_copy"):
        excess = state[name]["wrong_words"] - state[name]["planted"]
        is_blind |= excess < 0
        if excess > 0:
            parts.append(f"{excess} wrong words {name}")
    if is_blind:
        return "a planted mistake was not found, so the check is blind"
    text = f"{state['rounds']} rounds, {state['gib_each_way']} GiB each way: "
    text += ", ".join(parts) if parts else "every payload was there before its flag"
    if state["rounds"] < found["rounds_wanted"]:
        text += f" (time allowed fewer than {found['rounds_wanted']} rounds)"
    return text


def _outstanding(found: Found) -> str:
    actions = {n: c for n, c in found.items() if isinstance(c, Mapping) and "went_on" in c}
    went = [name for name, case in actions.items() if case["went_on"]]
    stood = [name for name, case in actions.items() if not case["went_on"]]
    text = f"went on: {', '.join(went) or 'nothing'}; stood still or failed: "
    text += ", ".join(stood) or "nothing"
    parts = [_filled(found[f"{what} queue"], what) for what in ("launch", "record")]
    return "; ".join([text, *parts])


def _filled(queue: Found, what: str) -> str:
    depth = queue["calls_before_one_blocked"]
    if depth is None:
        return f"{queue['tried']} times {what} did not fill the queue"
    pause_ms, blocked_ms = queue["longest_pause_of_another_thread_ms"], queue["blocked_ms"]
    lock = "free" if pause_ms < blocked_ms / 2 else "HELD"
    return f"{what} {depth + 1} blocked for {blocked_ms} ms with Python's lock {lock}"


def _recovery(found: Found) -> str:
    parts = []
    for name in ("worker killed", "worker stopped"):
        case = found[name]
        is_well = all(case[key] for key in ("was_held", "worker_is_gone", "device_computes"))
        is_well &= case["supervisor_exit_code"] == 0
        outcome = "recovered after" if is_well else "NOT properly recovered, stream ended after"
        parts.append(f"{name}: {outcome} {case['recovered_ms']} ms")
    gone = found["waiter killed"]
    parts.append(f"waiter killed: its processes were gone after {gone['processes_gone_ms']} ms")
    left = [*found["segments_left"], *["a descriptor"] * max(0, found["descriptors_left"])]
    parts.append(f"left behind: {', '.join(left) or 'nothing'}")
    return ", ".join(parts)


def _graphs(found: Found) -> str:
    if not found["captured"]:
        return f"not captured: {found['error']}"
    wrong = found["wrong_words_to_worker"] + found["wrong_words_to_device"]
    counted = found["rounds_counted_by_device"] == found["replays"]
    text = f"captured and replayed {found['replays']} times, {found['us_per_replay']} us each, "
    text += f"{wrong} wrong words"
    return text if counted else text + ", but the device did not run every replay"


def _triton_arguments(found: Found) -> str:
    parts = []
    for name, case in found.items():
        if not case["accepted"]:
            parts.append(f"by {name}: not accepted")
        elif case["found"] != case["planted"]:
            parts.append(f"by {name}: the count of wrong words is blind")
        else:
            stale = case["stale_words"]
            parts.append(f"by {name}: {stale} stale words in {case['num_launches']} launches")
    if not parts:
        raise KeyError("a way to pass memory")
    return ", ".join(parts)


def _ceilings(found: Found) -> str:
    return (
        f"copy {found['copy_within_device_gb_per_s']} GB/s (read + written), bf16 matrices "
        f"{found['bf16_matrix_tflops']} TFLOP/s, link {found['to_device_gb_per_s']} GB/s to the "
        f"device and {found['to_host_gb_per_s']} GB/s to the host"
    )


_SENTENCES: dict[str, Callable[[Found], str]] = {
    "1": _registration,
    "2": _coherence,
    "3": _round_trips,
    "4": _ordering,
    "5": _outstanding,
    "6": _recovery,
    "7": _graphs,
    "8": _triton_arguments,
    "ceilings": _ceilings,
}

"""The lines shown at start."""

import msgspec
from corun.runtime.adapters.info import AdapterInfo
from corun.runtime.engine.assembly.build import summary_lines
from corun.runtime.engine.messages import ModelInfo

MIB = 2**20
INFO = ModelInfo(
    name="models/base",
    dtype="bfloat16",
    device="cpu",
    max_model_len=2048,
    max_num_batched_tokens=512,
    vocab_size=100,
    eos_token_ids=(2,),
    default_sampling={},
    kv_capacity_tokens=4096,
    memory_bytes=10 * MIB,
    max_num_waiting=10,
    model_path="models/base",
    device_choices={"sync": "host", "link": "16 GiB/s + 10 us"},
    backends={},
    summary=(),
)


def adapter(name: str, rank: int, mib: int, state: str = "ready") -> AdapterInfo:
    return AdapterInfo(name, "", state, None, rank, mib * MIB, "")


def test_names_everything_a_user_needs() -> None:
    lines = summary_lines(INFO, [adapter("a", 8, 4), adapter("b", 64, 5)], {"LoRA": "numba"}, "on CPU 3")
    text = "\n".join(lines)
    for part in (
        "models/base",
        "bfloat16 on cpu",
        "LoRA numba",
        "2048",
        "4096 tokens",
        "on CPU 3",
        "link 16 GiB/s",
    ):
        assert part in text
    assert "2 ready, ranks 8 to 64, 9.0 MiB; all fit at once" in text


def test_says_how_much_kv_the_host_has_room_for() -> None:
    assert "on the host" not in "\n".join(summary_lines(INFO, [], {}, ""))
    info = msgspec.structs.replace(INFO, host_kv_tokens=9000)
    assert "KV for 4096 tokens and up to 9000 on the host" in "\n".join(summary_lines(info, [], {}, ""))


def test_says_what_the_weights_take() -> None:
    info = msgspec.structs.replace(INFO, weight_bytes=5 * MIB)
    assert "weights   5.0 MiB in bfloat16" in summary_lines(info, [], {}, "")
    info = msgspec.structs.replace(info, quantized_bytes=3 * MIB, backends={"weights": "int8"})
    assert "weights   3.0 MiB in int8, 2.0 MiB in bfloat16" in summary_lines(info, [], {}, "")


def test_says_how_many_adapters_fit() -> None:
    adapters = [adapter(str(i), 8, 4) for i in range(3)]
    assert "2 of them fit at once" in summary_lines(INFO, adapters, {}, "")[-1]


def test_counts_failed_adapters_and_the_absence_of_any() -> None:
    failed = adapter("x", 0, 0, state="failed")
    assert "1 failed to load" in summary_lines(INFO, [adapter("a", 8, 4), failed], {}, "")[-1]
    assert summary_lines(INFO, [], {}, "")[-1].endswith("none")


def test_says_that_nothing_was_measured() -> None:
    assert "co-execution" not in "".join(summary_lines(INFO, [], {}, ""))
    failed = msgspec.structs.replace(INFO, has_profile_failed=True)
    assert "co-execution is off" in summary_lines(failed, [], {}, "")[-1]


def test_what_fits_is_counted_in_what_adapters_have_alone() -> None:
    adapters = [adapter(str(i), 8, 4) for i in range(3)]
    apart = msgspec.structs.replace(INFO, adapter_memory_bytes=4 * MIB)
    *_, memory, _, last = summary_lines(apart, adapters, {}, "")
    assert "1 of them fit at once" in last
    assert "0.00391 GiB of it for adapters alone" in memory

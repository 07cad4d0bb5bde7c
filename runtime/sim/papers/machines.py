"""Machines of papers, as data: every figure has its source or was set by hand.

Machines with an engine of a paper have no pages of blocks: S-LoRA, which those engines descend
from, has pages of one vector, so that no adapter needs adjacent ones and bytes are all that counts.
Machines with corun's engine (``_card``) have pages as on CUDA.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ....cpu_workers.teams import JobModel
from ....profiles.curve import Curve
from ....profiles.models import GroupModel, LinkModel, LoraModel, MachineModel
from ..machines import SimulatedMachine
from .shapes import LLAMA_7B, LLAMA_8B, LLAMA_13B, LLAMA_30B, LLAMA_70B, LlamaShape

# Toppings, figure 4: 256 and 1,024 tokens of a prompt take 44 and 90 ms.
_PREFILL_S = 28.7e-3
_PREFILL_S_PER_TOKEN = 0.0599e-3
# Figure 6: 24 rows of rank 32 and 16 of rank 64 take 34.8 and 35.8 ms with padded kernels (BGMV),
# 35.3 and 35.9 ms with exact ones (MBGMV). The exact ones have a fixed cost besides.
_DECODE_S = 31.8e-3
_EXACT_FIXED_S = 33.5e-3 - _DECODE_S
_PADDED_S_PER_RANK = 3.9e-6  # per row and the largest rank
_EXACT_S_PER_RANK = 2.34e-6  # per rank of each row
# Section 7.3: prefill with workers takes 61 and 126 ms at 64 and 256 tokens. The difference to the
# device alone counts as invocations: 16 tokens of rank 64 on one core take no longer than q, k and
# v on the device.
_ASSISTED_S = {64: 61e-3, 256: 126e-3}
_NUM_WORKERS = 16  # figure 17, right
_WORKER_FLOP_PER_S = 200e9  # by hand: a core with tiles of bfloat16
_A100_BYTES_PER_S = 2.0e12  # of its memory, 80 GB: data sheet

# LoRAServe, section V-B: Llama 7B on four A100s of 40 GB. Prompts of 2,000 tokens take 2.7 times as
# long with rank 128 as with rank 8 (figure 3); these figures, by hand, give 2.6.
_TP4_STEP_S = 10e-3
_TP4_S_PER_TOKEN = 90e-6
_TP4_S_PER_KEY = 0.35e-6  # of rows that decode
_TP4_BYTES_PER_S = 4 * 1.555e12  # of their memory: data sheet
# Share by which a token of rank 128 takes longer; light: figure 5, 20 % at eight GPUs.
_TP4_RANK_SHARES = {"padded": 2.0, "exact": 2.0, "light": 0.2}
TP4_KERNELS = tuple(_TP4_RANK_SHARES)

_MAX_TOKENS = 2048.0
_SLOW_LINK = LinkModel(bytes_per_s=12e9, latency_s=1e-3)  # by hand, in the range of figure 4, right
_FAST_LINK = LinkModel(bytes_per_s=25e9, latency_s=1e-3)  # by hand: PCIe 4 x16 as it is reached


def toppings_model(shape: LlamaShape, *, is_padded: bool) -> MachineModel:
    """One A100 as in Toppings, adapters on q, k and v. Its steps decode apart from prefill.

    Context costs nothing, as in the paper. Adapters in prefill, for which it has no figures,
    multiply as fast as the base model.
    """
    values = shape.num_layers * shape.layer_values
    token_s = _PREFILL_S_PER_TOKEN * values / (LLAMA_7B.num_layers * LLAMA_7B.layer_values)
    fixed_s = _fixed_s(shape, _PREFILL_S, _A100_BYTES_PER_S)
    per_rank_s = _PADDED_S_PER_RANK if is_padded else _EXACT_S_PER_RANK
    invocation_s, invocation_s_per_token = _invocations()
    return MachineModel(
        num_layers=shape.num_layers,
        step_s=_line(fixed_s, token_s),
        groups=(_qkv(shape, fixed_s, token_s),),
        invocation_s=invocation_s,
        lora=LoraModel(
            decode_s_per_byte=per_rank_s / LLAMA_7B.qkv_bytes_per_rank,
            decode_fixed_s=0.0 if is_padded else _EXACT_FIXED_S,
            prefill_s_per_token_byte=token_s / (2 * values),
            prefill_fixed_s=0.0,
            is_padded=is_padded,
        ),
        link=_SLOW_LINK,
        num_workers=_NUM_WORKERS,
        job=JobModel(s_per_product=2 / _WORKER_FLOP_PER_S),
        invocation_s_per_token=invocation_s_per_token * shape.hidden / LLAMA_7B.hidden,
        decode_step_s=Curve((1.0,), (_fixed_s(shape, _DECODE_S, _A100_BYTES_PER_S),)),
    )


def loraserve_model(shape: LlamaShape, kernels: str) -> MachineModel:
    """Four A100s as in LoRAServe, adapters on q, k, v and o; ``kernels``: of ``TP4_KERNELS``."""
    rank_s = _TP4_S_PER_TOKEN * _TP4_RANK_SHARES[kernels] / 128
    byte_s = rank_s / LLAMA_7B.attention_bytes_per_rank
    values = shape.num_layers * shape.layer_values
    token_s = _TP4_S_PER_TOKEN * values / (LLAMA_7B.num_layers * LLAMA_7B.layer_values)
    key_share = shape.kv_bytes_per_token / LLAMA_7B.kv_bytes_per_token
    return MachineModel(
        num_layers=shape.num_layers,
        step_s=_line(0.0, token_s),
        groups=(),
        invocation_s=0.0,
        lora=LoraModel(byte_s, 0.0, byte_s, 0.0, is_padded=kernels == "padded"),
        link=_FAST_LINK,
        num_workers=0,
        host_step_s=_fixed_s(shape, _TP4_STEP_S, _TP4_BYTES_PER_S),
        decode_s_per_key=_TP4_S_PER_KEY * key_share,
    )


def _fixed_s(shape: LlamaShape, llama_7b_s: float, bytes_per_s: float) -> float:
    """The fixed time of a step, scaled from that of Llama 7B."""
    read_s = LLAMA_7B.weight_bytes / bytes_per_s
    layers = shape.num_layers / LLAMA_7B.num_layers
    return shape.weight_bytes / bytes_per_s + layers * (llama_7b_s - read_s)


def _invocations() -> tuple[float, float]:
    """One layer's invocation: seconds, and seconds per token."""
    (few, few_s), (many, many_s) = (
        (tokens, (assisted_s - _PREFILL_S - _PREFILL_S_PER_TOKEN * tokens) / LLAMA_7B.num_layers)
        for tokens, assisted_s in _ASSISTED_S.items()
    )
    per_token_s = (many_s - few_s) / (many - few)
    return few_s - per_token_s * few, per_token_s


def _qkv(shape: LlamaShape, fixed_s: float, token_s: float) -> GroupModel:
    share = shape.qkv_share / shape.num_layers
    width = shape.qkv_bytes_per_rank / (2 * 3 * shape.num_layers)
    return GroupModel("q_proj", _line(share * fixed_s, share * token_s), width)


def _line(fixed_s: float, token_s: float) -> Curve:
    return Curve((0.0, _MAX_TOKENS), (fixed_s, fixed_s + _MAX_TOKENS * token_s))


_GIB = 2**30


def _a40(
    name: str, *, kv_bytes_per_token: int, adapter_bytes_per_rank: int, group_targets: tuple[int, ...]
) -> SimulatedMachine:
    """A server with one A40 as in Chameleon, section 5.1, and no CPU workers.

    All times are set by hand, in the range of that paper's section 3; none was measured here.
    """
    per_rank_s = 1.0 / adapter_bytes_per_rank
    model = MachineModel(
        num_layers=32,  # Llama 7B and 8B: config.json
        step_s=Curve((0.0, 512.0), (0.0, 512 * 0.20e-3)),  # by hand: 0.20 ms per prefill token
        groups=(),
        invocation_s=0.0,
        lora=LoraModel(
            decode_s_per_byte=4e-6 * per_rank_s,  # by hand: 4 us per rank of decode rows
            decode_fixed_s=0.0,
            prefill_s_per_token_byte=1.2e-6 * per_rank_s,  # by hand: 1.2 us per token and rank
            prefill_fixed_s=0.0,
        ),
        link=LinkModel(bytes_per_s=12e9, latency_s=1e-3),  # by hand: PCIe 3 x16 as it is reached
        num_workers=0,
        host_step_s=12e-3,  # by hand, as all that follow
        host_row_s=0.05e-3,
        prefill_s_per_token_key=7e-9,
        decode_s_per_key=1e-6,
        read_s=23e-3,
        decode_token_share=0.0,
    )
    return SimulatedMachine(
        name=name,
        model=model,
        memory_bytes=28 * _GIB,  # by hand: 48 GB without the weights and what a forward needs
        kv_bytes_per_token=kv_bytes_per_token,
        adapter_bytes_per_rank=adapter_bytes_per_rank,
        group_targets=group_targets,
        file_bytes_per_s=2e9,  # by hand: an NVMe disk
        has_pages=False,
    )


def _with_slow_link(machine: SimulatedMachine) -> SimulatedMachine:
    """A link at a quarter of the speed: it is shared, or has fewer lanes."""
    model = replace(machine.model, link=LinkModel(bytes_per_s=3e9, latency_s=1e-3))  # by hand
    return replace(machine, name=f"{machine.name}-link3", model=model)


def _with_workers(machine: SimulatedMachine, group_widths: Sequence[int]) -> SimulatedMachine:
    """With 16 CPU workers that keep up with the device's own products at ranks up to 100 or so.

    ``group_widths``: inputs plus outputs of each group's targets: the multiplications of a delta
    per token and rank. Base products are assumed to be proportional to them.
    """
    model, max_tokens = machine.model, float(machine.max_num_batched_tokens)
    layer_s = model.step_s.at(max_tokens) / model.num_layers
    groups = []
    for index, (width, num_targets) in enumerate(zip(group_widths, machine.group_targets, strict=True)):
        base_s = Curve((0.0, max_tokens), (0.0, layer_s * width / sum(group_widths)))
        groups.append(GroupModel(f"group {index}", base_s, width / num_targets))
    workers = replace(
        model,
        groups=tuple(groups),
        num_workers=16,
        job=JobModel(s_per_product=2 / _WORKER_FLOP_PER_S),
        invocation_s=20e-6,  # by hand
    )
    return replace(machine, name=f"{machine.name}-workers", model=workers)


# 32 layers, 32 heads of 128, keys and values in 2 bytes. An adapter of rank 64 on q, k and v is
# 96 MiB: rank x (4096 + 4096) x 3 targets x 32 layers x 2 bytes.
_LLAMA_7B = _a40(
    "a40-llama7b", kv_bytes_per_token=2**19, adapter_bytes_per_rank=3 * 2**19, group_targets=(3,)
)
# 32 layers, 8 key and value heads of 128. Adapters on all linears: by hand, about what their shapes
# (4096, 1024, 14336) give.
_LLAMA_8B = _a40(
    "a40-llama8b",
    kv_bytes_per_token=128 * 2**10,
    adapter_bytes_per_rank=5_100_000,
    group_targets=(3, 1, 2, 1),
)
_SLOW_8B = _with_slow_link(_LLAMA_8B)
# Widths of q, k and v; of o; of gate and up; of down.
_WIDTHS_8B = (18432, 8192, 36864, 18432)
_ASSISTED_8B = _with_workers(_LLAMA_8B, _WIDTHS_8B)
_CORE_BYTES_PER_S = 10e9  # by hand: of a core with 15 others beside it
# Counted without a GPU, of Llama 8B (tests/gpu/test_cuda_counts.py): launches of a forward pass,
# what adapters add to them, and launches of the sampler, which the host awaits once.
LAUNCHES = 303
LORA_LAUNCHES = 256
_SAMPLER_LAUNCHES = 7
_WAIT_S = 20e-6  # by hand
# The host's time per launch, on the H100 of bench/RESULTS.md: a decode step took 23.2 ms with 1,269
# launches, and with adapters 15.3 ms more with 448 more.
_LAUNCH_S = 18e-6
_LORA_LAUNCH_S = 34e-6
# Operations of an assisted pass, counted: 1,248 for 4 groups of 32 layers; the time of each by hand.
_INVOCATION_S = 1248 / (4 * 32) * 10e-6


def _card(
    name: str,
    memory_gb: int,
    bytes_per_s: float,
    flop_per_s: float,
    link_bytes_per_s: float,
    core_flop_per_s: float,
) -> SimulatedMachine:
    """A server with Llama 8B on a GPU, and 16 CPU workers.

    Times follow from shapes and these rates, which are set by hand, about as they are reached.
    Weights, KV and adapters are read once per pass. The host launches beside the device, so a pass
    takes the longer of both. Rows with deltas from workers have a pass of their own, as in the CUDA
    engine.
    """
    shape, per_rank = LLAMA_8B, _LLAMA_8B.adapter_bytes_per_rank
    num_bytes = 2 * shape.num_layers * shape.layer_values  # and as many operations per token
    device_s, launching_s = num_bytes / bytes_per_s, LAUNCHES * _LAUNCH_S
    with_lora_s = launching_s + LORA_LAUNCHES * _LORA_LAUNCH_S
    model = MachineModel(
        num_layers=shape.num_layers,
        step_s=_read_or_multiply(num_bytes, bytes_per_s, flop_per_s),
        groups=_card_groups(bytes_per_s, flop_per_s),
        invocation_s=_INVOCATION_S,
        lora=LoraModel(
            decode_s_per_byte=1.0 / bytes_per_s,
            decode_fixed_s=max(device_s, with_lora_s) - max(device_s, launching_s),
            prefill_s_per_token_byte=1.0 / flop_per_s,
            prefill_fixed_s=0.0,
            prefill_s_per_byte=1.0 / bytes_per_s,
        ),
        link=LinkModel(link_bytes_per_s, 20e-6),  # by hand, as the workers and the time of a row
        num_workers=16,
        job=_card_job(core_flop_per_s),
        host_step_s=_SAMPLER_LAUNCHES * _LAUNCH_S + _WAIT_S,
        host_row_s=0.02e-3,
        read_s=launching_s,
        prefill_s_per_token_key=4.0 * shape.hidden * shape.num_layers / flop_per_s,
        decode_s_per_key=shape.kv_bytes_per_token / bytes_per_s,
    )
    return SimulatedMachine(
        name=name,
        model=model,
        memory_bytes=_without_weights(memory_gb, shape),
        kv_bytes_per_token=shape.kv_bytes_per_token,
        adapter_bytes_per_rank=per_rank,
        group_targets=_LLAMA_8B.group_targets,
        file_bytes_per_s=2e9,
        max_num_batched_tokens=2048,
        separate_assisted_rows=True,
    )


def _card_job(core_flop_per_s: float) -> JobModel:
    """A core reads at ``_CORE_BYTES_PER_S``. Modelled, as all that follows; nothing was measured.

    x and y are in its cache. A worker takes a few calls from Python for a job, as here. A member
    waits for a line of memory from another core, and sharing costs two more calls.
    """
    return JobModel(
        s_per_value=2 / _CORE_BYTES_PER_S,
        s_per_product=2 / core_flop_per_s,
        call_s=5e-6,
        member_s=0.3e-6,
        share_s=5e-6,
    )


def _card_groups(bytes_per_s: float, flop_per_s: float) -> tuple[GroupModel, ...]:
    """The input groups of a layer."""
    return tuple(
        GroupModel(
            f"group {index}", _read_or_multiply(base_bytes, bytes_per_s, flop_per_s), width / num_targets
        )
        for index, (base_bytes, width, num_targets) in enumerate(
            zip(LLAMA_8B.group_bytes, _WIDTHS_8B, _LLAMA_8B.group_targets, strict=True)
        )
    )


def _read_or_multiply(num_bytes: float, bytes_per_s: float, flop_per_s: float) -> Curve:
    """Time over tokens of a product with a matrix of 16 bits: reading it, or the arithmetic."""
    most_tokens = 2048.0
    return Curve(
        (flop_per_s / bytes_per_s, most_tokens),
        (num_bytes / bytes_per_s, most_tokens * num_bytes / flop_per_s),
    )


def _a100(name: str, shape: LlamaShape, *, is_padded: bool, memory_gb: int = 80) -> SimulatedMachine:
    """A server with one A100 as in Toppings, section 7."""
    return SimulatedMachine(
        name=name,
        model=toppings_model(shape, is_padded=is_padded),
        memory_bytes=_without_weights(memory_gb, shape),
        kv_bytes_per_token=shape.kv_bytes_per_token,
        adapter_bytes_per_rank=shape.qkv_bytes_per_rank,
        group_targets=(3,),
        file_bytes_per_s=2e9,  # by hand: an NVMe disk
        max_num_batched_tokens=2048,  # by hand
        max_num_seqs=64,  # Toppings, section 2.3
        mix_decode_with_prefill=False,
        has_pages=False,
    )


def _tp4(name: str, shape: LlamaShape, kernels: str, memory_bytes: int) -> SimulatedMachine:
    """A server with four A100s as in LoRAServe, section V-B."""
    return SimulatedMachine(
        name=name,
        model=loraserve_model(shape, kernels),
        memory_bytes=memory_bytes,
        kv_bytes_per_token=shape.kv_bytes_per_token,
        adapter_bytes_per_rank=shape.attention_bytes_per_rank,
        group_targets=(3, 1),
        file_bytes_per_s=2e9,  # by hand: an NVMe disk
        max_num_batched_tokens=2048,  # by hand, as the next
        max_num_seqs=96,
        has_pages=False,
    )


def _without_weights(memory_gb: int, shape: LlamaShape) -> int:
    """By hand: a tenth of the memory is for activations."""
    return memory_gb * 900_000_000 - shape.weight_bytes


# Sizes that Chameleon runs on an A100, section 5.5.
_A100_SCALED = (
    (24, "7b", LLAMA_7B),
    (48, "7b", LLAMA_7B),
    (48, "13b", LLAMA_13B),
    (80, "13b", LLAMA_13B),
    (80, "30b", LLAMA_30B),
)
_TP4_SCALED = (("30b", LLAMA_30B), ("70b", LLAMA_70B))  # LoRAServe, figure 23

MACHINES: Mapping[str, SimulatedMachine] = {
    machine.name: machine
    for machine in (
        *(_LLAMA_7B, _LLAMA_8B, _SLOW_8B, _ASSISTED_8B),
        _card("a10-llama8b", 24, 600e9, 70e12, 20e9, 200e9),
        _card("a100-llama8b", 80, 2e12, 180e12, 22e9, 200e9),
        _card("h100-llama8b", 80, 3.35e12, 450e12, 50e9, 400e9),
        _a100("a100-llama2-7b", LLAMA_7B, is_padded=True),
        _a100("a100-llama2-7b-exact", LLAMA_7B, is_padded=False),
        *(
            _a100(f"a100-{gb}gb-llama{size}-scaled", shape, is_padded=False, memory_gb=gb)
            for gb, size, shape in _A100_SCALED
        ),
        *(
            # By hand: 100,000 tokens.
            _tp4(f"tp4-llama7b-{name}", LLAMA_7B, name, 100_000 * LLAMA_7B.kv_bytes_per_token)
            for name in TP4_KERNELS
        ),
        *(
            # With 80 GB each.
            _tp4(f"tp4-llama{size}-{name}-scaled", shape, name, _without_weights(320, shape))
            for size, shape in _TP4_SCALED
            for name in TP4_KERNELS
        ),
    )
}


def _cached(machine: SimulatedMachine, ranks: Sequence[int]) -> SimulatedMachine:
    """CACHED: the device has room for all adapters, and a load takes no time."""
    model = replace(machine.model, link=LinkModel(bytes_per_s=1e18, latency_s=0.0), load_s=0.0)
    memory_bytes = machine.memory_bytes + sum(ranks) * machine.adapter_bytes_per_rank
    return replace(
        machine, model=model, memory_bytes=memory_bytes, file_bytes_per_s=1e18, separate_assisted_rows=False
    )


def _serial(machine: SimulatedMachine, ranks: Sequence[int]) -> SimulatedMachine:
    """As S-LoRA: a load begins after the step, and the next step after the load."""
    return replace(machine, loads_between_steps=True)


BASELINES = {"cached": _cached, "serial": _serial}

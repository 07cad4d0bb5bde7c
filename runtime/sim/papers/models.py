"""Latency models with figures of papers, for the models that these measured and for larger ones.

Missing figures are set by hand. Models that a paper did not measure are scaled by their shapes:
arithmetic with the weights of a layer's linears, the reading of weights with their bytes, and the
rest of a step's fixed time with the number of layers. Costs of adapters are proportional to their
bytes.
"""

from ....cpu_workers.teams import JobModel
from ....profiles.curve import Curve
from ....profiles.models import GroupModel, LinkModel, LoraModel, MachineModel
from .shapes import LLAMA_7B, LlamaShape

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
WORKER_FLOP_PER_S = 200e9  # by hand: a core with tiles of bfloat16
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
        job=JobModel(s_per_product=2 / WORKER_FLOP_PER_S),
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

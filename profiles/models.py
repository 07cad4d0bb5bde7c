"""Latency models of one machine and one model's shape, for the predictions of policy. Pure.

Profiles are measured by ``corun profile`` and are independent of requests and plans. All times are
seconds.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ..cpu_workers.teams import JobModel
from .curve import Curve

_NO_JOBS = JobModel()


@dataclass(frozen=True, slots=True)
class LoraModel:
    """Time of adapters' products on the device, linear in the adapters' bytes.

    Source: Toppings, section 5, equation 2, in both forms. With exact kernels (MBGMV) each row
    costs as much as its own adapter; padded ones (BGMV) compute every row of a pass, the base
    model's too, with the pass's largest adapter. The paper uses ranks; bytes are proportional to
    them for adapters with the same targets, and also apply to other adapters. Prefill, which the
    paper leaves out, is linear in tokens times bytes; in bytes, which are read once for any number
    of tokens; and in tokens, as x and y are read and written at any rank.
    """

    decode_s_per_byte: float  # of the sum over rows
    decode_fixed_s: float
    prefill_s_per_token_byte: float
    prefill_fixed_s: float
    prefill_s_per_token: float = 0.0
    prefill_s_per_byte: float = 0.0
    is_padded: bool = False  # False: the kernels are exact, as corun's are

    def decode_s(self, adapter_bytes: Sequence[int]) -> float:
        """One decode step over all layers, for rows with adapters of these sizes (0 = base)."""
        total_bytes = sum(adapter_bytes)
        return self.decode_fixed_s + self.decode_s_per_byte * total_bytes if total_bytes else 0.0

    def prefill_s(self, num_tokens: int, adapter_bytes: int) -> float:
        """One prefill chunk over all layers, or with padded kernels all chunks of a pass."""
        if not adapter_bytes or not num_tokens:
            return 0.0
        per_token_s = self.prefill_s_per_token + self.prefill_s_per_token_byte * adapter_bytes
        read_s = self.prefill_fixed_s + self.prefill_s_per_byte * adapter_bytes
        return read_s + per_token_s * num_tokens


@dataclass(frozen=True, slots=True)
class LinkModel:
    """Copies from host memory to the device."""

    bytes_per_s: float
    latency_s: float


@dataclass(frozen=True, slots=True)
class GroupModel:
    """One input group of a layer: linears that read the same x."""

    name: str  # of its first target, for reports
    base_s: Curve  # over tokens: the base products on the device
    width: float  # values of A and B for each rank, the mean of its targets: see ``JobModel``


@dataclass(frozen=True, slots=True)
class MachineModel:
    """All models that the planner predicts with."""

    num_layers: int
    step_s: Curve  # over tokens: one forward of the base model, all layers, without attention
    groups: tuple[GroupModel, ...]  # by the number of the input group in a layer
    # Per input group beside the arithmetic: copy out, signal, wait, add. 0 without workers.
    invocation_s: float
    lora: LoraModel
    link: LinkModel
    num_workers: int
    invocation_s_per_token: float = 0.0  # x and y are copied, so more tokens cost more
    # Once per pass with assisted rows: publishing jobs and collecting results.
    assisted_pass_s: float = 0.0
    # Slowdown of device and workers while both compute, as a share of that time: on the CPU they
    # share memory and caches, and sometimes a core.
    contention: float = 0.0
    # Terms that ``step_time.forward_s`` adds to the curve ``step_s``, which is without attention.
    host_step_s: float = 0.0
    # Over rows: a pass of decode rows alone, which can be captured; None = as ``step_s``.
    decode_step_s: Curve | None = None
    host_row_s: float = 0.0  # of each row of any kind
    prefill_s_per_token_key: float = 0.0  # per pair of a prefill token and a key
    decode_s_per_key: float = 0.0
    # Reading of the base weights, or launching, which hides arithmetic of prefill; 0 where the curve,
    # which is then flat at first, contains it.
    read_s: float = 0.0
    # Time of the engine's core around a step, while the device is idle, and per row.
    turn_s: float = 0.0
    turn_row_s: float = 0.0
    # The same per request, to add and to finish it, and per load, to plan and to start it.
    request_s: float = 0.0
    load_s: float = 0.0
    decode_token_share: float = 1.0  # tokens of the curve that a decode row counts as
    job: JobModel = _NO_JOBS

    def invoke_s(self, num_tokens: int) -> float:
        """One input group's invocation, beside the arithmetic."""
        return self.invocation_s + self.invocation_s_per_token * num_tokens

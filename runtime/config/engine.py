"""What an engine is built from. Frozen: facts of the machine are resolved elsewhere."""

from dataclasses import dataclass

from ...cpu_workers.kernels.simd import isa
from ..coldstart.strategy import LoadStrategy
from ..memory.policies.registry import MEMORY_POLICIES
from ..scheduler.predictor import OUTPUT_PREDICTORS
from ..scheduler.registry import SCHEDULER_POLICIES
from .notations import (
    check_cpu_cores,
    check_lora_resolvers,
    parse_cpu_cores,
    parse_lora_modules,
    parse_num_bytes,
    parse_queues,
    parse_weights,
)
from .option import check_config, option

CPU_ISAS = isa.NAMES
DEVICES = ("auto", "cuda", "cpu")
DTYPES = ("auto", "float32", "bfloat16", "float16")
QUANTIZATIONS = ("int8", "int4")
LINEAR_BACKENDS = ("auto", "numba", "onednn", "plain")
ATTENTION_BACKENDS = ("auto", "numba", "triton", "torch")
LORA_BACKENDS = ("auto", "numba", "triton", "torch")
FUSED_KERNELS = ("auto", "off")
DECODE_GRAPHS = ("auto", "off")
PREFIX_CACHES = ("on", "off")
LOAD_STRATEGIES = ("auto", *(strategy.value for strategy in LoadStrategy))
DEVICE_SYNCS = ("auto", "stream", "host")
DELTA_BACKENDS = ("auto", "numba", "numpy", "torch")

# Commands besides ``serve``; ``profile`` takes what changes how fast things are, and how the model
# is loaded.
_PROFILE = ("profile",)
_CHECK = ("check",)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Options of the engine, shared by ``corun serve`` and ``import corun``.

    Raises ``ConfigError`` for a value of the wrong type or out of range.
    """

    model: str | None = option(
        None,
        positional=True,
        help="Directory or hub id of the base model; without it, the packaged demo model.",
        commands=_PROFILE,
    )
    revision: str | None = option(
        None, help="Branch, tag or commit of a hub model.", commands=_PROFILE + _CHECK
    )
    trust_remote_code: bool = option(
        False,
        help="Run Python code that comes with the model. Off unless you trust its author.",
        commands=_PROFILE + _CHECK,
    )
    device: str = option(
        "auto", choices=DEVICES, help="Where the base model runs.", commands=_PROFILE
    )
    dtype: str = option(
        "auto",
        choices=DTYPES,
        help="Type of weights and KV; auto = the model's.",
        commands=_PROFILE + _CHECK,
    )
    quantization: str | None = option(
        None, choices=QUANTIZATIONS, commands=_PROFILE + _CHECK,
        help="Weights of the base's linears, in groups of 64, on the CPU; made at the first start "
        "and kept. Checkpoints that are quantised on disk need no option.",
    )  # fmt: skip
    lm_head_quantization: str = option(
        "auto", choices=("auto", "off", *QUANTIZATIONS), commands=_PROFILE + _CHECK,
        help="The same for the output head; auto = int8 with --quantization, else as on disk.",
    )  # fmt: skip
    max_model_len: int | None = option(
        None,
        minimum=2,
        help="Longest prompt plus output, in tokens; default: what the model was made for.",
        commands=_PROFILE,
    )
    max_num_batched_tokens: int = option(
        512, minimum=1, maximum=2**20, help="Tokens that one step computes at most.",
        commands=_PROFILE,
    )  # fmt: skip
    max_decode_gap_s: float | None = option(
        None, above=0, maximum=86400,
        help="Seconds that a step may take that computes a prompt while other requests decode; the "
        "prompt's chunk is cut, to one block at least. Default: the time of five decode steps or, "
        "if that is longer, of the smallest chunk that keeps 97 % of the prefill rate (without a "
        "profile: of a quarter of --max-num-batched-tokens).",
    )  # fmt: skip
    max_num_seqs: int = option(
        256, minimum=1, maximum=2**16, help="Requests that run at once at most."
    )
    max_logit_bias: int = option(
        1024, minimum=0, maximum=2**20, help="Entries of logit_bias of one request at most."
    )
    max_num_waiting: int = option(
        1024, minimum=1, maximum=2**20, help="Requests that wait at most; more are refused (429)."
    )
    max_queue_s: float | None = option(
        None, above=0, maximum=86400,
        help="Seconds that a request waits for its turn at most; then it is refused (429).",
    )  # fmt: skip
    max_stop_strings: int = option(
        16, minimum=0, maximum=1024, help="Stop strings of one request at most."
    )
    block_size: int = option(
        16, minimum=1, maximum=1024, help="Tokens in one KV block.", commands=_PROFILE
    )
    memory_gib: float | None = option(
        None, above=0,
        help="Memory for KV blocks and adapters together, in GiB. Default: --memory-fraction of "
        "what is free; on a CPU no more than --max-num-seqs requests of --max-model-len and "
        "adapters can need, nor than half of the machine, or 85 % of a control group's limit.",
    )  # fmt: skip
    memory_fraction: float = option(
        0.85, above=0, maximum=1,
        help="Share of the memory free after the model is loaded that the default takes at most.",
    )  # fmt: skip
    memory_policy: str = option(
        "corun",
        choices=tuple(MEMORY_POLICIES),
        help="Which adapters and which KV of requests that have ended leave the device first.",
    )
    memory_policy_weights: str | None = option(
        None,
        metavar="F,R,S",
        help="What memory policy chameleon gives frequency, recency and size of adapters; default: "
        "0.45,0.10,0.45.",
        check=parse_weights,
    )
    adapter_memory_fraction: float | None = option(
        None,
        above=0,
        maximum=0.95,
        help="Share of that memory that is for adapters alone, where the model runs on CUDA or the "
        "memory policy is static-split; default: 0.25. Elsewhere they share it with KV blocks.",
    )
    host_adapter_bytes: str | None = option(
        None,
        metavar="BYTES",
        number_as_text=True,
        help="Host memory for packed adapters, e.g. 4GiB, from which they are copied to the "
        "device; default: an eighth of what is free, 8 GiB at most. On a CPU without a link they "
        "stay where they are, in the memory of KV blocks and adapters, and this limits what of it "
        "holds adapters that no request uses.",
        check=parse_num_bytes,
    )
    host_kv_bytes: str | None = option(
        None,
        metavar="BYTES",
        number_as_text=True,
        help="Host memory, e.g. 16GiB, for KV of requests that have ended, which comes back to the "
        "device when others begin alike; default: an eighth of what is free, 16 GiB at most. None "
        "on a CPU without a link, where KV blocks are in the host's memory anyway.",
        check=parse_num_bytes,
    )
    prefix_cache: str = option(
        "on",
        choices=PREFIX_CACHES,
        help="Keep the KV of requests that have ended, for others that begin alike, until its "
        "memory is needed.",
    )
    scheduling_policy: str = option(
        "corun",
        choices=tuple(SCHEDULER_POLICIES),
        help="Who is admitted next, whose prompt is computed first, and who gives way.",
    )
    output_predictor: str = option(
        "history",
        choices=tuple(OUTPUT_PREDICTORS),
        help="How many output tokens admission keeps room for where a request does not say: what "
        "requests for the same adapter came to, or all that they may come to.",
    )
    slo_ttft_s: float | None = option(
        None, above=0, maximum=86400,
        help="Seconds to a first token that policies aim at; default: 5 times what an idle engine "
        "takes.",
    )  # fmt: skip
    refresh_s: float = option(
        300.0, above=0, maximum=86400,
        help="Seconds after which policies that have several queues cut them anew.",
    )  # fmt: skip
    queues: str = option(
        "auto",
        metavar="QUEUES",
        help="How many queues such policies have: fixed:K, K from 1 to 4, or auto = as many as the "
        "sizes of requests suggest.",
        check=parse_queues,
    )
    prefetch_requests: int = option(
        16,
        minimum=0,
        maximum=2**16,
        help="Waiting requests whose adapters are loaded ahead at most.",
    )
    prefetch_expected: bool = option(
        False,
        help="Load adapters before they are asked for, when they are expected by the time between "
        "their requests so far.",
    )
    log_slow_s: float | None = option(
        None,
        metavar="X",
        above=0,
        maximum=86400,
        help="Log what first tokens waited for that took longer than X seconds.",
    )
    growth_headroom: float = option(
        0.01, minimum=0, maximum=0.5,
        help="Share of the KV blocks that is kept for requests that outgrow their prediction.",
    )  # fmt: skip
    lora_dir: str | None = option(
        None,
        metavar="DIR",
        help="Directory whose sub-directories are PEFT adapters, named after them.",
    )
    adapter_templates: str = option(
        "use",
        choices=("use", "ignore"),
        help="Chat templates, end tokens and tokenizers in the folders of adapters.",
    )
    watch_lora_dir: str = option(
        "on",
        choices=("on", "off"),
        help="Serve what comes into --lora-dir while the engine runs, and what changes there; stop "
        "serving what goes.",
    )
    lora_modules: tuple[str, ...] = option(
        (),
        metavar="NAME=PATH",
        help="Adapters to serve, as name=path or as JSON with both.",
        check=parse_lora_modules,
    )
    lora_resolver: tuple[str, ...] = option(
        (),
        metavar="WHERE",
        one_each=True,
        help="Where adapters are found that requests name and nobody has registered: "
        "directory:DIR, hub (OWNER/NAME or OWNER/NAME@REVISION), hub:OWNER or hub:OWNER/NAME for "
        "those alone.",
        check=check_lora_resolvers,
    )
    preload: tuple[str, ...] = option(
        (),
        metavar="NAME",
        help="Adapters of these that are read at start, or 'all'; others when they are first used.",
    )
    pin: tuple[str, ...] = option(
        (),
        metavar="NAME",
        help="Adapters of these that stay on the device, as long as they are served.",
    )
    lora_state_file: str | None = option(
        None,
        metavar="FILE",
        help="Where adapters that are loaded while the engine runs are noted, for its next start.",
    )
    max_lora_rank: int = option(
        256,
        minimum=1,
        maximum=256,
        help="Highest LoRA rank accepted. A limit, not a padding size.",
        commands=_CHECK,
    )
    linear_backend: str = option(
        "auto", choices=LINEAR_BACKENDS, help="Matrix products.", commands=_PROFILE
    )
    attention_backend: str = option(
        "auto", choices=ATTENTION_BACKENDS, help="Paged attention.", commands=_PROFILE
    )
    lora_backend: str = option(
        "auto", choices=LORA_BACKENDS, help="LoRA products.", commands=_PROFILE
    )
    fused_kernels: str = option(
        "auto",
        choices=FUSED_KERNELS,
        help="Norms, rotary embeddings and gated activations in one pass, for bfloat16 on the CPU; "
        "auto = where a check at start finds them equal to the model's own.",
        commands=_PROFILE,
    )
    decode_graphs: str = option(
        "auto",
        choices=DECODE_GRAPHS,
        help="Replay captured decode steps on the CPU instead of running the model's modules; auto "
        "= once a replay has given the same logits, to the bit.",
        commands=_PROFILE,
    )
    cpu_isa: str = option(
        "auto",
        choices=CPU_ISAS,
        help="Instructions that kernels on the CPU, torch's and oneDNN's too, may use; auto = the "
        "highest level that the processor has.",
    )
    cpu_threads: int | None = option(
        None,
        minimum=1,
        maximum=4096,
        help="Threads of the CPU device at most; default: as physical cores and the CPU quota "
        "allow, or 1 where that measures as fast. Fewer compute while other processes use the "
        "cores.",
        commands=_PROFILE,
    )
    fixed_cpu_threads: bool = option(
        False, help="Compute with all threads while other processes use the cores, too."
    )
    cpu_cores: str = option(
        "auto",
        metavar="CPUS",
        number_as_text=True,
        help="CPUs of the workers that compute LoRA deltas, one each, e.g. 2-7,10; none = no "
        "workers; auto = physical cores near the accelerator, but the engine's.",
        commands=_PROFILE,
        check=check_cpu_cores,
    )
    engine_cores: str | None = option(
        None,
        metavar="CPUS",
        number_as_text=True,
        help="CPUs of the engine; default: with workers one physical core near the accelerator, "
        "otherwise any.",
        commands=_PROFILE,
        check=parse_cpu_cores,
    )
    delta_backend: str = option(
        "auto", choices=DELTA_BACKENDS, help="LoRA products on the CPU workers.", commands=_PROFILE
    )
    worker_slowdown: float = option(
        1.0,
        minimum=1,
        maximum=1000,
        help="Let a CPU worker take this many times as long, to measure what slow cores do.",
        commands=_PROFILE,
    )
    profile: str | None = option(
        None,
        metavar="FILE",
        help="What corun profile has measured; default: the one kept for this machine and model, "
        "or if there is none a quick one, measured at start. Not used where adapters are not "
        "copied to the device.",
    )
    load_strategy: str = option(
        "auto",
        choices=LOAD_STRATEGIES,
        help="How a request starts whose adapter is not on the device; auto = the one that is "
        "predicted to be best.",
    )
    max_assisted_tokens_per_step: int = option(
        512,
        minimum=1,
        maximum=2**20,
        help="Tokens that one step computes at most for requests whose adapter is being loaded.",
    )
    max_assisted_stall: float = option(
        0.05,
        minimum=0,
        maximum=10,
        help="Share of a step by which such requests together may hold it up; a chunk that would "
        "take more is cut, and waits if that does not help.",
    )
    link_gib_per_s: float | None = option(
        None,
        above=0,
        help="Pace copies between host and device to this bandwidth in each direction, to measure "
        "what a slower link does; default: as fast as it goes.",
        commands=_PROFILE,
    )
    link_latency_us: float = option(
        0.0,
        minimum=0,
        maximum=1e6,
        help="Let such copies arrive so many microseconds later.",
        commands=_PROFILE,
    )
    device_sync: str = option(
        "auto",
        choices=DEVICE_SYNCS,
        help="How CUDA works with shared memory and CPU workers: stream = memory registered with "
        "the driver, streams that signal and wait; host = the engine's threads signal, wait and "
        "copy in between; auto = stream where a probe at start finds that it works.",
        commands=_PROFILE,
    )
    skip_parity_probe: bool = option(
        False,
        help="Serve a model although the start-up comparison with transformers fails.",
        commands=_PROFILE,
    )
    seed: int = option(
        0, minimum=-(2**63), maximum=2**64 - 1, help="Seed for requests that bring none."
    )

    def __post_init__(self) -> None:
        check_config(self)

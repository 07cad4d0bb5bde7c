"""What an engine is built from. Frozen: facts of the machine are resolved elsewhere."""

from dataclasses import dataclass

from ...cpu_workers.kernels.simd import isa
from ..coldstart.strategy import LoadStrategy
from ..memory.policies.registry import MEMORY_POLICIES, memory_policy_maker
from ..scheduler.predictor import OUTPUT_PREDICTORS
from ..scheduler.registry import SCHEDULER_POLICIES, policy_maker
from .notations import (
    check_cpu_cores,
    check_device,
    check_lora_resolvers,
    parse_cpu_cores,
    parse_lora_modules,
    parse_num_bytes,
)
from .option import check_config, option

CPU_ISAS = isa.NAMES
DTYPES = ("auto", "float32", "bfloat16", "float16")
QUANTIZATIONS = ("int8", "int4", "w8a8")
OFF = "off"
LINEAR_BACKENDS = ("auto", "numba", "onednn", "plain")
ATTENTION_BACKENDS = ("auto", "numba", "triton", "torch")
LORA_BACKENDS = ("auto", "numba", "triton", "torch")
FUSED_KERNELS = ("auto", "off")
DECODE_GRAPHS = ("auto", "off")
PREFIX_CACHES = ("on", "off")
SIMULATED_BASELINES = ("cached", "serial")  # values of --load-strategy that no engine has
LOAD_STRATEGIES = ("auto", *(strategy.value for strategy in LoadStrategy), *SIMULATED_BASELINES)
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
        help="Directory or hub id of the base model; default: the packaged demo model.",
        commands=_PROFILE,
    )
    revision: str | None = option(
        None, help="Branch, tag or commit of a hub model.", commands=_PROFILE + _CHECK
    )
    trust_remote_code: bool = option(
        False,
        help="Run Python code that comes with the model. Use it only for authors that you trust.",
        commands=_PROFILE + _CHECK,
    )
    device: str = option(
        "auto", check=check_device, help="Device: auto, cpu, cuda or cuda:N.", commands=_PROFILE
    )
    dtype: str = option(
        "auto",
        choices=DTYPES,
        help="Type of weights and KV; auto = the model's own.",
        commands=_PROFILE + _CHECK,
    )
    quantization: str | None = option(
        None,
        choices=(*QUANTIZATIONS, OFF),
        commands=_PROFILE + _CHECK,
        help="Store the base model's linear layers in 8 or 4 bits, on the CPU. Groups have 64 "
        "weights. w8a8 also rounds the inputs of products to 8 bits: faster, less exact. The first "
        "start quantises, and later starts reuse the result. Checkpoints that are quantised on "
        "disk need no option; off reads them in full.",
    )
    lm_head_quantization: str = option(
        "auto",
        choices=("auto", OFF, "int8", "int4"),
        commands=_PROFILE + _CHECK,
        help="Store the output head in 8 or 4 bits; auto = int8 with --quantization, otherwise as on disk.",
    )
    max_model_len: int | None = option(
        None,
        minimum=2,
        help="Maximum length of prompt plus output, in tokens; default: the model's own limit.",
        commands=_PROFILE,
    )
    max_num_batched_tokens: int | None = option(
        None,
        minimum=1,
        maximum=2**20,
        help="Maximum number of tokens per step; default: 512, on CUDA 2048.",
        commands=_PROFILE,
    )
    max_decode_gap_s: float | None = option(
        None,
        above=0,
        maximum=86400,
        help="Maximum seconds of a step that computes a prompt while other requests decode. The "
        "prompt's chunk is cut to fit, but to no less than one block. Default: the time of five "
        "decode steps, but always enough for an efficient chunk: the smallest that keeps 97 % of "
        "the prefill rate or, without a profile, a quarter of --max-num-batched-tokens.",
    )
    max_num_seqs: int = option(
        256, minimum=1, maximum=2**16, help="Maximum number of requests that run at once."
    )
    max_logit_bias: int = option(
        1024, minimum=0, maximum=2**20, help="Maximum entries in a request's logit_bias."
    )
    max_num_waiting: int = option(
        1024, minimum=1, maximum=2**20, help="Maximum waiting requests; more are refused (429)."
    )
    max_waiting_chars: int = option(
        2**25,
        minimum=1,
        maximum=2**40,
        help="Maximum characters of prompts that wait to be tokenized; more are refused (429). "
        "Prompts of more than 32,768 characters are counted apart, with the same limit.",
    )
    max_queue_s: float | None = option(
        None,
        above=0,
        maximum=86400,
        help="Maximum seconds that a request waits to start; then it is refused (429).",
    )
    max_stop_strings: int = option(
        16, minimum=0, maximum=1024, help="Maximum number of stop strings of a request."
    )
    max_stop_bytes: int = option(
        16384, minimum=0, maximum=2**24, help="Maximum bytes of all stop strings of a request."
    )
    max_bad_words_bytes: int = option(
        65536, minimum=0, maximum=2**24, help="Maximum bytes of all bad_words of a request."
    )
    block_size: int = option(16, minimum=1, maximum=1024, help="Tokens per KV block.", commands=_PROFILE)
    memory_gib: float | None = option(
        None,
        above=0,
        help="Memory for KV blocks and adapters together, in GiB. Default: --memory-fraction of "
        "the free memory. On a CPU the default is also limited to what the adapters and "
        "--max-num-seqs requests of --max-model-len can need, and to half of the machine's memory "
        "or 85 % of a control group's limit.",
    )
    memory_fraction: float | None = option(
        None,
        above=0,
        maximum=1,
        help="Share of the free memory, once the model is loaded, that is the default of --memory-gib; "
        "default: 0.85. On CUDA the memory of the largest step is set aside first; default: 0.95.",
    )
    memory_policy: str = option(
        "corun",
        metavar="POLICY",
        help="Chooses which adapters and which KV of finished requests leave the device first. "
        f"One of {', '.join(MEMORY_POLICIES)}. chameleon takes weights: "
        "chameleon:frequency=0.45,recency=0.1,size=0.45. Parts of libra can be switched off: "
        "libra:dependencies=0,costs=0,reward=0,swapper=0. corun:swapper=1 brings back adapters and KV "
        "while memory is idle.",
        check=memory_policy_maker,
    )
    adapter_memory_fraction: float | None = option(
        None,
        above=0,
        maximum=0.95,
        help="Share of the memory that is for adapters alone, with --memory-policy static-split; "
        "default: 0.25. With any other policy adapters and KV blocks share the memory.",
    )
    host_bytes: str | None = option(
        None,
        metavar="BYTES",
        number_as_text=True,
        help="Host memory for packed adapters and for KV of finished requests together, such as 16GiB; "
        "default: a quarter of the free memory, at most 24 GiB. Both are copied from there to the "
        "device, and memory moves to the one that needs it. On a CPU without --link-gib-per-s adapters "
        "are used in place, KV blocks are in host memory anyway, and this limits the memory of adapters "
        "that no request uses.",
        check=parse_num_bytes,
    )
    prefix_cache: str = option(
        "on",
        choices=PREFIX_CACHES,
        help="Keep the KV of finished requests for later requests with the same prefix, until its "
        "memory is needed.",
    )
    scheduling_policy: str = option(
        "corun",
        metavar="POLICY",
        help="Order in which requests are admitted, prompts computed and requests preempted. "
        f"One of {', '.join(SCHEDULER_POLICIES)}. The last three take a number of queues, from 1 "
        "to 4, and the seconds after which queues are divided again: "
        "chameleon:queues=4,refresh=300.",
        check=policy_maker,
    )
    output_predictor: str = option(
        "history",
        choices=tuple(OUTPUT_PREDICTORS),
        help="How many output tokens admission reserves for a request without "
        "predicted_output_tokens: history = the mean of earlier requests for the same adapter, "
        "limit = the request's maximum.",
    )
    slo_ttft_s: float | None = option(
        None,
        above=0,
        maximum=86400,
        help="Target time to first token, in seconds; default: 5 times that of an idle engine.",
    )
    prefetch_requests: int = option(
        16,
        minimum=0,
        maximum=2**16,
        help="Maximum number of waiting requests for which adapters are loaded ahead.",
    )
    log_slow_s: float | None = option(
        None,
        metavar="X",
        above=0,
        maximum=86400,
        help="Log what a first token waited for if it took more than X seconds.",
    )
    engine_hang_s: float = option(
        30.0,
        above=0,
        maximum=86400,
        help="Seconds without progress after which an engine with work is not ready (/ready: 503). "
        "After four times as long its requests end with an error and it is killed; corun serve "
        "then ends with exit code 3. Each layer of a pass is progress.",
    )
    growth_headroom: float = option(
        0.01,
        minimum=0,
        maximum=0.5,
        help="Share of the KV blocks that is kept for requests that outgrow their prediction.",
    )
    lora_dir: str | None = option(
        None, metavar="DIR", help="Directory of PEFT adapters; each sub-directory is served under its name."
    )
    adapter_templates: str = option(
        "use",
        choices=("use", "ignore"),
        help="Whether chat templates, end tokens and tokenizers in adapter directories are used.",
    )
    watch_lora_dir: str = option(
        "on",
        choices=("on", "off"),
        help="Serve adapters that are added to --lora-dir or changed there while the engine "
        "runs, and stop serving those that are removed.",
    )
    lora_modules: tuple[str, ...] = option(
        (),
        metavar="NAME=PATH",
        help="Adapters to serve, each as NAME=PATH or as JSON with name and path.",
        check=parse_lora_modules,
    )
    lora_resolver: tuple[str, ...] = option(
        (),
        metavar="WHERE",
        one_each=True,
        help="Source of adapters that a request names and that are not registered: "
        "directory:DIR, hub, hub:OWNER or hub:OWNER/NAME. Names on the hub are OWNER/NAME or "
        "OWNER/NAME@REVISION; the last two forms allow only this owner or repository. With hub, "
        "only requests with a key of --admin-key have adapters fetched.",
        check=check_lora_resolvers,
    )
    preload: tuple[str, ...] = option(
        (),
        metavar="NAME",
        help="Names of adapters that are read at start, or 'all'; the rest are read on first use.",
    )
    pin: tuple[str, ...] = option(
        (), metavar="NAME", help="Names of adapters that stay on the device as long as they are served."
    )
    lora_state_file: str | None = option(
        None, metavar="FILE", help="File that keeps adapters loaded over HTTP for the next start."
    )
    allowed_lora_dirs: tuple[str, ...] = ()  # an option of the server, which sets it here
    max_lora_rank: int = option(
        256,
        minimum=1,
        maximum=256,
        commands=_CHECK,
        help="Highest LoRA rank that is accepted. It is a limit, not a padding size.",
    )
    linear_backend: str = option(
        "auto", choices=LINEAR_BACKENDS, help="Kernels of matrix products.", commands=_PROFILE
    )
    attention_backend: str = option(
        "auto", choices=ATTENTION_BACKENDS, help="Kernels of paged attention.", commands=_PROFILE
    )
    lora_backend: str = option(
        "auto", choices=LORA_BACKENDS, help="Kernels of LoRA products.", commands=_PROFILE
    )
    fused_kernels: str = option(
        "auto",
        choices=FUSED_KERNELS,
        help="Compute norms, rotations and gated activations in one pass each, in bfloat16, on "
        "CUDA also in float16; auto = where a check at start finds them equal to the model's own.",
        commands=_PROFILE,
    )
    decode_graphs: str = option(
        "auto",
        choices=DECODE_GRAPHS,
        help="Replay captured decode steps instead of running the model's modules; auto = once a replay "
        "has given the logits of the modules, on the CPU to the bit.",
        commands=_PROFILE,
    )
    cpu_isa: str = option(
        "auto",
        choices=CPU_ISAS,
        help="Instruction set that CPU kernels may use, including those of torch and oneDNN; "
        "auto = the highest that the processor has.",
    )
    cpu_threads: int | None = option(
        None,
        minimum=1,
        maximum=4096,
        help="Maximum number of threads of the CPU device; default: the number of physical cores "
        "within the CPU quota, or 1 if a measurement finds that as fast. Fewer threads compute "
        "while other processes use the cores.",
        commands=_PROFILE,
    )
    fixed_cpu_threads: bool = option(
        False, help="Compute with all threads even while other processes use the cores."
    )
    cpu_cores: str = option(
        "auto",
        metavar="CPUS",
        number_as_text=True,
        help="CPUs of the workers that compute LoRA deltas, one each, such as 2-7,10; none = no "
        "workers; auto = physical cores near the accelerator, except the engine's.",
        commands=_PROFILE,
        check=check_cpu_cores,
    )
    engine_cores: str | None = option(
        None,
        metavar="CPUS",
        number_as_text=True,
        commands=_PROFILE,
        check=parse_cpu_cores,
        help="CPUs of the engine; default: with workers one physical core near the accelerator, "
        "otherwise any.",
    )
    delta_backend: str = option(
        "auto", choices=DELTA_BACKENDS, help="LoRA kernels of the CPU workers.", commands=_PROFILE
    )
    worker_slowdown: float = option(
        1.0,
        minimum=1,
        maximum=1000,
        commands=_PROFILE,
        help="Make CPU workers slower by this factor, to measure the effect of slow cores.",
    )
    profile: str | None = option(
        None,
        metavar="FILE",
        help="Profile of this machine, written by corun profile; default: the one kept for this "
        "machine and model, otherwise one that is measured at start. Not used where "
        "adapters are not copied to the device.",
    )
    load_strategy: str = option(
        "auto",
        choices=LOAD_STRATEGIES,
        help="How a request starts if its adapter is not on the device; auto = the planner chooses "
        "for each request. Only in corun simulate: cached = all adapters are on the device, which "
        "has room for them; serial = adapters are loaded between steps, in which no request runs.",
    )
    max_assisted_tokens_per_step: int = option(
        512,
        minimum=1,
        maximum=2**20,
        help="Maximum tokens per step for requests that run before their adapter is loaded.",
    )
    cold_priority: float = option(
        1.0,
        minimum=0,
        maximum=1000,
        help="Weight of a second of a request that runs before its adapter is loaded, if a second of "
        "the requests beside it weighs 1. 0 = the requests beside it do not wait to let it start sooner.",
    )
    max_assisted_stall: float | None = option(
        None,
        minimum=0,
        maximum=10,
        help="Maximum delay of a step by requests that run before their adapter is loaded, all "
        "together, as a share of the step's time. A chunk that would exceed it is cut, or waits. "
        "Default: no limit; --cold-priority decides.",
    )
    link_gib_per_s: float | None = option(
        None,
        above=0,
        help="Limit copies between host and device to this bandwidth in each direction, to "
        "measure the effect of a slower link; default: no limit.",
        commands=_PROFILE,
    )
    link_latency_us: float = option(
        0.0,
        minimum=0,
        maximum=1e6,
        commands=_PROFILE,
        help="Delay copies between host and device by this many microseconds.",
    )
    device_sync: str = option(
        "auto",
        choices=DEVICE_SYNCS,
        help="How CUDA streams and CPU workers synchronise: stream = shared memory is registered "
        "with the driver, and streams signal and wait; host = threads of the engine signal, wait "
        "and copy; auto = stream if a probe at start finds that it works, otherwise host.",
        commands=_PROFILE,
    )
    skip_parity_probe: bool = option(
        False,
        help="Serve the model even if the comparison with transformers at start fails.",
        commands=_PROFILE,
    )
    seed: int = option(0, minimum=-(2**63), maximum=2**64 - 1, help="Seed of requests that have none.")

    def step_tokens(self, device_type: str) -> int:
        """``max_num_batched_tokens``, or the default of a device: "cpu" or "cuda"."""
        # A GPU launches as many kernels for 512 tokens as for 2048, in the time of a step of 512.
        return self.max_num_batched_tokens or (2048 if device_type == "cuda" else 512)

    def memory_share(self, device_type: str) -> float:
        """``memory_fraction``, or the default of a device: "cpu" or "cuda"."""
        # What is not counted on CUDA: kernels that are loaded on use, and gaps of the allocator.
        return self.memory_fraction or (0.95 if device_type == "cuda" else 0.85)

    def __post_init__(self) -> None:
        check_config(self)

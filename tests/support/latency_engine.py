"""``corun serve`` over a machine that is simulated on the real clock: many fit on two cores.

The HTTP server, the front end, the engine's core with its policies, and adapters' files with their
digests are real. All requests get the same token, up to their maximum, at the times of a model of
the machine. Run as ``COMMAND serve MODEL …`` with ``environment`` of its settings.
"""

import itertools
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import msgspec
from corun.runtime.adapter import AdapterFacts, AdapterOutline
from corun.runtime.adapters.checkpoint import Checkpoint
from corun.runtime.adapters.content import AdapterContent
from corun.runtime.adapters.load import open_adapter
from corun.runtime.adapters.registry import AdapterVersion
from corun.runtime.adapters.resolved import AdapterPath
from corun.runtime.adapters.target_map import Target, TargetMap
from corun.runtime.cli.main import configure_logging
from corun.runtime.cli.parser import parse_arguments
from corun.runtime.cli.serve import serve_configs
from corun.runtime.config.demo import model_name
from corun.runtime.config.engine import EngineConfig
from corun.runtime.engine.adapter_manager import AdapterManager
from corun.runtime.engine.adapter_reading import MakeRoom
from corun.runtime.engine.client import EngineClient, ProcessClient, ThreadClient
from corun.runtime.engine.core import CoreConfig, EngineCore
from corun.runtime.engine.heartbeat import Heartbeat
from corun.runtime.engine.messages import ModelInfo, TokenizerSpec
from corun.runtime.plan import HostPlaceId, RequestId
from corun.runtime.scheduler.step_times import StepPace
from corun.runtime.sim.engine import SimulationOptions, make_simulated_scheduler
from corun.runtime.sim.executor import END_TOKEN, ORDINARY_TOKEN, LatencyExecutor
from corun.runtime.sim.machines import Factors, SimulatedMachine, slowed
from corun.runtime.sim.papers.machines import MACHINES
from support.fake_core import FakeGrammars

TESTS = Path(__file__).parents[1]
COMMAND = (sys.executable, "-P", "-m", "support.latency_engine")
FACTORY = "support.latency_engine:build"
VOCAB_SIZE = 1 << 20  # so that prompts may have any token ids
BASE_FINGERPRINT = "latency"
_VARIABLE = "CORUN_TEST_LATENCY"
_START_TIMEOUT_S = 60.0
_URL = re.compile(r"serving .* at (http://\S+)/v1$", re.MULTILINE)
_WEIGHTS, _CONFIG = "adapter_model.safetensors", "adapter_config.json"
_A_NAME = re.compile(r"base_model\.model\.(.*layers\.(\d+)\..*)\.lora_A\.weight")


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencySettings:
    """Settings of such an engine."""

    machine: SimulatedMachine | str = "a40-llama7b"  # a name is one of ``MACHINES``
    slowness: float = 1.0  # factor by which steps are slower than the machine's model, undisclosed
    scheduling_policy: str = "fcfs"
    memory_policy: str = "lru"
    prefix_cache: bool = False
    host_bytes: int = 1 << 40
    own_process: bool = False  # of the engine, apart from the HTTP server

    def environment(self) -> dict[str, str]:
        """The environment of a process of ``COMMAND``."""
        paths = [str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
        return os.environ | {
            _VARIABLE: msgspec.json.encode(self).decode(),
            "PYTHONPATH": os.pathsep.join(paths),
        }

    @property
    def found_machine(self) -> SimulatedMachine:
        return MACHINES[self.machine] if isinstance(self.machine, str) else self.machine


class LatencyServer:
    """A server in processes of its own; ``wait_ready`` before it is used. Closing leaves none."""

    def __init__(
        self, settings: LatencySettings, *arguments: str, model: str = "latency", port: int = 0
    ) -> None:
        """``arguments``: options of ``corun serve``. Adapters may be loaded over HTTP."""
        # A full pipe without a reader would block it.
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            [*COMMAND, "serve", model, "--port", str(port), "--allow-runtime-lora-updating", *arguments],
            env=settings.environment(),
            stdin=subprocess.DEVNULL,
            stderr=self._log,
        )
        self.url = ""

    @property
    def pid(self) -> int:
        return self._process.pid

    def log(self) -> str:
        size = os.fstat(self._log.fileno()).st_size
        return os.pread(self._log.fileno(), size, 0).decode()

    def wait_ready(self) -> Self:
        """Wait for the line of the log with its address."""
        deadline_s = time.monotonic() + _START_TIMEOUT_S
        while (found := _URL.search(self.log())) is None:
            assert self._process.poll() is None and time.monotonic() < deadline_s, self.log()
            time.sleep(0.02)
        self.url = found[1]
        return self

    def __enter__(self) -> Self:
        return self.wait_ready()

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._log.close()


def save_tiny_adapter(directory: Path, *, rank: int = 8, seed: int = 0) -> Path:
    """Save a genuine PEFT directory of a few hundred bytes per rank; return it."""
    import numpy as np
    from safetensors.numpy import save_file

    rng = np.random.default_rng(seed)
    prefix = "base_model.model.model.layers.0.self_attn.q_proj"
    tensors = {
        f"{prefix}.lora_A.weight": rng.standard_normal((rank, 8), dtype=np.float32),
        f"{prefix}.lora_B.weight": rng.standard_normal((8, rank), dtype=np.float32),
    }
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / _WEIGHTS)
    fields = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": ["q_proj"],
        "base_model_name_or_path": None,
    }
    (directory / _CONFIG).write_bytes(msgspec.json.encode(fields))
    return directory


class _Core(EngineCore):
    """Wakes for results of its executor, which has no descriptor for them."""

    executor: LatencyExecutor

    def wake_at_s(self) -> float | None:
        result_at_s = self.executor.result_at_s
        wake_at_s = super().wake_at_s()
        return min(wake_at_s or math.inf, result_at_s) if result_at_s < math.inf else wake_at_s


class _Files:
    """Reads any adapter for any model; the machine decides its size."""

    def __init__(self, machine: SimulatedMachine) -> None:
        self._machine = machine

    def outline(self, path: AdapterPath) -> AdapterOutline:
        facts = self._facts(str(path))
        return AdapterOutline(facts.rank, facts.num_bytes)

    def begin(self, path: AdapterPath) -> None:
        """Its loads read no files."""

    def read(self, path: AdapterPath, make_room: MakeRoom, known: AdapterVersion | None) -> AdapterContent:
        facts = self._facts(str(path))
        is_kept = make_room(facts.host_bytes) is not None
        return AdapterContent(facts, is_kept=is_kept)

    def _facts(self, path: str) -> AdapterFacts:
        directory = Path(path)
        with open_adapter(directory, _target_map(directory), max_rank=1 << 12) as adapter:
            for _ in adapter.read_layers(lambda tensors: None):
                pass
            return self._machine.adapter_facts(adapter.digest.hexadecimal, adapter.adapter.max_rank)


def _target_map(directory: Path) -> TargetMap:
    """Of a model that the adapter fits."""
    with Checkpoint(directory, max_tensor_bytes=1 << 40) as checkpoint:
        shapes = {tensor.name: tensor.shape for tensor in checkpoint.tensors}
    targets: list[Target] = []
    for name, shape in shapes.items():
        if found := _A_NAME.fullmatch(name):
            out_features = shapes[name.replace("lora_A", "lora_B")][0]
            path, layer, index = found[1], int(found[2]), len(targets)
            targets.append(Target(index, path, layer, index, shape[1], out_features, path))
    return TargetMap(tuple(targets), {})


class _Host:
    """The account without contents."""

    def evict(self, place_ids: Iterable[HostPlaceId]) -> None:
        pass

    def remove_content(self, digest: str) -> None:
        pass


class _Endless(Mapping[RequestId, int]):
    """Requests end at their maximum number of tokens."""

    def __getitem__(self, request_id: RequestId) -> int:
        return 1 << 40

    def __iter__(self) -> Iterator[RequestId]:
        return map(RequestId, itertools.count(1))

    def __len__(self) -> int:
        return 1 << 40


@dataclass(frozen=True)
class LatencyAssembly:
    """What the factory returns."""

    core: EngineCore
    info: ModelInfo
    adapters: AdapterManager
    tokenizer: TokenizerSpec
    executor: LatencyExecutor
    grammars: FakeGrammars = field(default_factory=FakeGrammars)

    def begin(self) -> None:
        """A model of a machine follows no grammars."""

    def publish_to(self, heartbeat: Heartbeat) -> None:
        """A model of a machine has neither layers nor compilations."""

    def close(self) -> None:
        self.adapters.close()
        self.executor.close()


def build(config: EngineConfig, *, on_progress: Callable[[str], None], own_process: bool) -> LatencyAssembly:
    """The factory; the settings are in the environment."""
    settings = _settings()
    machine = settings.found_machine
    options = SimulationOptions(
        scheduling_policy=settings.scheduling_policy,
        memory_policy=settings.memory_policy,
        prefix_cache=settings.prefix_cache,
        host_bytes=settings.host_bytes,
    )
    name = model_name(config)
    manager = AdapterManager(_Files(machine), (name,), _Host())
    executor = LatencyExecutor(
        replace(machine, model=slowed(machine.model, Factors(step=settings.slowness))),
        _Endless(),
        lambda adapter_id: manager.version(adapter_id).facts,
        clock=time.monotonic,
        sleep=time.sleep,
    )
    core = _Core(
        make_simulated_scheduler(machine, options, _Endless(), StepPace(machine.model)),
        executor,
        manager,
        CoreConfig(base_fingerprint=BASE_FINGERPRINT, dtype="float32", machine=machine.model),
        clock=time.monotonic,
        on_adapter_gone=manager.remove_version,
    )
    core.executor = executor
    manager.attach(core)
    return LatencyAssembly(core, _model_info(config, name, machine), manager, _tokenizer(), executor)


def _settings() -> LatencySettings:
    return msgspec.json.decode(os.environ.get(_VARIABLE, "{}"), type=LatencySettings)


def _model_info(config: EngineConfig, name: str, machine: SimulatedMachine) -> ModelInfo:
    num_tokens = machine.num_blocks * machine.block_size
    return ModelInfo(
        name=name,
        dtype="float32",
        device="latency",
        max_model_len=min(num_tokens, 1 << 15),
        max_num_batched_tokens=machine.max_num_batched_tokens,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=(END_TOKEN,),
        default_sampling={},
        kv_capacity_tokens=num_tokens,
        memory_bytes=machine.memory_bytes,
        max_num_waiting=config.max_num_waiting,
        model_path=str(config.model),
        device_choices={},
        backends={},
        summary=(f"a model of {machine.name}",),
        max_queue_s=config.max_queue_s,
        base_fingerprint=BASE_FINGERPRINT,
        adapter_bytes_per_rank=machine.adapter_bytes_per_rank,
    )


def _tokenizer() -> TokenizerSpec:
    """All words but the generated one are unknown."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"</s>": END_TOKEN, "token": ORDINARY_TOKEN, "<unk>": 2}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    template = "{% for message in messages %}{{ message.content }} {% endfor %}"
    return TokenizerSpec(tokenizer.to_str(), {"eos_token": "</s>"}, template)


def _make_client(settings: LatencySettings) -> Callable[[EngineConfig], EngineClient]:
    def make(config: EngineConfig) -> EngineClient:
        client: Any = ProcessClient if settings.own_process else ThreadClient
        made: EngineClient = client(config, factory=FACTORY)
        return made

    return make


def main(arguments: Sequence[str]) -> int:
    """Do what ``corun serve`` does."""
    import uvloop
    from corun.runtime.server.run import serve

    settings = _settings()
    machine = settings.found_machine
    engine_config, serve_config = serve_configs(parse_arguments(arguments))
    configure_logging(serve_config.log_level)
    engine_config = replace(
        engine_config,
        max_num_batched_tokens=machine.max_num_batched_tokens,
        max_num_seqs=machine.max_num_seqs,
        block_size=machine.block_size,
    )
    return uvloop.run(serve(engine_config, serve_config, make_client=_make_client(settings)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""End-to-end requirements of a device, on the CPU and, if there is one, on CUDA.

tests/parity and the server's tests here also run on both.
"""

import signal
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from corun import Engine, LoRARequest, SamplingParams
from corun.gpu.coexec.invocation import Invocation
from corun.gpu.lora.adapter_layout import GroupKey
from corun.runtime.coldstart.strategy import LoadStrategy
from corun.runtime.errors import ConfigError, RequestError
from corun.runtime.memory.policies.registry import MEMORY_POLICIES
from support.cold_engine import ColdEngine
from support.cold_parity import LARGE_SPEC, NUM_LAYERS, check, make_case, prompts, split_at
from support.devices import DEVICES
from support.model_profiles import Figures
from support.parity import MAX_LOGPROBS, AdapterSpec, ParityCase, largest_error
from support.worker_pool import are_gone, wait_until

SPECS = (
    AdapterSpec("query and value", {"r": 16, "target_modules": ["q_proj", "v_proj"]}),
    AdapterSpec("all linears", {"r": 16}),
    LARGE_SPEC,  # of rank 256
)
NAMES = tuple(spec.name for spec in SPECS)
MAX_RELATIVE_ERROR = 1e-4


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> ParityCase:
    return make_case(tmp_path_factory.mktemp("deep"), SPECS)


@pytest.fixture(scope="module", params=DEVICES)
def cold_engine(
    request: pytest.FixtureRequest, case: ParityCase, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ColdEngine]:
    with ColdEngine(
        case.directory,
        case.adapters,
        tmp_path_factory.mktemp("engine"),
        device=request.param,
        figures=Figures(link_bytes_per_s=1e6),
        delta_backend="numpy",  # as it is paced to
    ) as engine:
        yield engine


# On the CPU tests/parity/test_coexecution.py and test_coexecution_faults.py ask for the same.
_REPEATED = () if torch.cuda.is_available() else (pytest.mark.full,)


@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param(one, marks=() if one is LoadStrategy.ASSISTED else _REPEATED)
        for one in (None, *LoadStrategy)
    ],
)
def test_cold_adapters_under_every_strategy(
    cold_engine: ColdEngine, case: ParityCase, strategy: LoadStrategy | None
) -> None:
    """Beside rows of the base; None = the planner chooses."""
    cold_engine.wait_workers()
    cold_engine.use_strategy(strategy)
    names = [None, *NAMES, *NAMES]
    cold_engine.plans.clear()
    for name, prompt in zip(names, prompts(len(names), seed=40), strict=True):
        cold_engine.ask(name, prompt)
    answers = cold_engine.run()
    splits = [split for batch in cold_engine.assisted for split in batch.split_layers]
    assert (max(splits, default=0) > 0) >= (strategy is LoadStrategy.ASSISTED)
    check(case, answers)
    assert cold_engine.core.stats().num_retried_rows == 0
    cold_engine.check_nothing_is_held()


class KillOnce:
    """Kills the worker in the middle of an assisted pass, after x was sent to it."""

    def __init__(self, engine: ColdEngine, key: GroupKey) -> None:
        self.worker, self.key = engine.processes[1], key
        self.has_killed = False

    def __call__(self, invocation: Invocation) -> None:
        if invocation.key == self.key and not self.has_killed:
            self.has_killed = True
            self.worker.send_signal(signal.SIGKILL)


@pytest.mark.parametrize("key", [pytest.param((2, 1), marks=_REPEATED)])
def test_a_worker_that_is_killed(cold_engine: ColdEngine, case: ParityCase, key: GroupKey) -> None:
    cold_engine.wait_workers()
    before = cold_engine.core.stats()
    kill = KillOnce(cold_engine, key)
    with cold_engine.watched_sends(kill), cold_engine.chunks(split_at(NUM_LAYERS, 16)):
        for name, prompt in zip([None, *NAMES], prompts(4, seed=41), strict=True):
            cold_engine.ask(name, prompt)
        answers = cold_engine.run()
    assert kill.has_killed
    check(case, answers)
    after = cold_engine.core.stats()
    assert after.num_retried_rows > before.num_retried_rows
    assert after.num_failed_steps == 0
    wait_until(lambda: are_gone([kill.worker.pid]))
    cold_engine.wait_workers()
    cold_engine.check_nothing_is_held()


GREEDY = SamplingParams(temperature=0, max_tokens=24, logprobs=MAX_LOGPROBS, ignore_eos=True)
NUM_ADAPTERS, NUM_THAT_FIT, RANK = 50, 20, 8


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> ParityCase:
    options = {"r": RANK, "target_modules": ["q_proj", "v_proj"]}
    specs = [AdapterSpec(f"adapter {number}", options) for number in range(NUM_ADAPTERS)]
    return ParityCase("llama3-rope", tmp_path_factory.mktemp("many"), specs=specs)


def room(
    where: str, case: ParityCase, *, num_tokens: int, num_adapters: int, is_split: bool = False
) -> dict[str, Any]:
    """Options for this much room in float32; on CUDA each adapter has whole pages."""
    adapter_bytes = num_adapters * max(map(file_bytes, case.adapters.values()))
    if where == "cuda":
        adapter_bytes += num_adapters * case.kv_block_bytes(4, torch.float32)
    memory_bytes = adapter_bytes + case.kv_block_bytes(num_tokens, torch.float32)
    options: dict[str, Any] = {"device": where, "memory_gib": memory_bytes / 2**30}
    if is_split:
        options["adapter_memory_fraction"] = adapter_bytes / memory_bytes
    return {**options, "dtype": "float32", "block_size": 4, "max_lora_rank": RANK}


def file_bytes(path: Path) -> int:
    return (path / "adapter_model.safetensors").stat().st_size


IN_EVERY_RUN = ("corun", "static-split")
POLICIES = [
    pytest.param(name, marks=() if name in IN_EVERY_RUN else pytest.mark.full) for name in MEMORY_POLICIES
]


@pytest.mark.usefixtures("one_torch_thread")
@pytest.mark.parametrize("memory_policy", POLICIES)
@pytest.mark.parametrize("where", DEVICES)
def test_more_adapters_than_fit(many: ParityCase, where: str, memory_policy: str) -> None:
    """All are requested at once, twice, and no request fails: adapters are evicted."""
    names = [*many.adapters] * 2
    greedy = replace(GREEDY, max_tokens=6)
    is_split = memory_policy == "static-split"
    options = room(where, many, num_tokens=200, num_adapters=NUM_THAT_FIT, is_split=is_split)
    options["memory_policy"] = memory_policy
    with Engine(model=str(many.directory), max_model_len=20, **options) as engine:
        loras = [LoRARequest(name, 1, str(many.adapters[name])) for name in names]
        outputs = engine.generate([[5, 6, 7, 8]] * len(names), greedy, loras)
        assert engine.get_stats().num_device_evictions >= NUM_ADAPTERS - NUM_THAT_FIT
    answers = [output.outputs[0].token_ids for output in outputs]
    assert answers[:NUM_ADAPTERS] == answers[NUM_ADAPTERS:]
    for name, output in list(zip(names, outputs, strict=True))[:: NUM_ADAPTERS // 5]:
        assert largest_error(many, output, name) < MAX_RELATIVE_ERROR


def pin_all(engine: Engine, names: Sequence[str]) -> None:
    for name in names:
        engine.pin_lora(name)


@pytest.mark.usefixtures("one_torch_thread")
@pytest.mark.parametrize("where", DEVICES)
def test_what_is_pinned_stays_while_others_come_and_go(many: ParityCase, where: str) -> None:
    first, second, *others = many.adapters
    options = room(where, many, num_tokens=200, num_adapters=NUM_THAT_FIT)
    options["lora_modules"] = (f"{first}={many.adapters[first]}",)
    with pytest.raises(ConfigError, match=r"--pin nobody: no model or adapter is named"):
        Engine(model=str(many.directory), max_model_len=20, pin=("nobody",), **options)
    with Engine(model=str(many.directory), max_model_len=20, pin=(first,), **options) as engine:
        engine.add_lora(LoRARequest(second, 1, str(many.adapters[second])), pinned=True)
        # They are read beside requests, which on a busy machine may all be answered first.
        wait_until(lambda: sum(info.is_resident for info in engine.list_loras()) == 2)
        loras = [LoRARequest(name, 1, str(many.adapters[name])) for name in others]
        for _ in range(2):
            engine.generate([[5, 6, 7]] * len(loras), replace(GREEDY, max_tokens=2), loras)
        assert engine.get_stats().num_device_evictions >= NUM_ADAPTERS - NUM_THAT_FIT
        infos = {info.name: info for info in engine.list_loras()}
        assert {name for name, info in infos.items() if info.pinned} == {first, second}
        assert infos[first].is_resident and infos[second].is_resident
        with pytest.raises(RequestError, match=r"are pinned already .* one request may need"):
            pin_all(engine, others)
        pinned = [info.name for info in engine.list_loras() if info.pinned]
        assert 2 < len(pinned) < NUM_ADAPTERS - 2
        output, *_ = engine.generate([[5, 6, 7, 8]], replace(GREEDY, max_tokens=6), others[-1])
        assert largest_error(many, output, others[-1]) < MAX_RELATIVE_ERROR
        for name in pinned:
            engine.pin_lora(name, pinned=False)
        assert not any(info.pinned for info in engine.list_loras())


@pytest.mark.usefixtures("one_torch_thread")
@pytest.mark.parametrize("where", DEVICES)
def test_more_requests_than_fit(many: ParityCase, where: str) -> None:
    """Some are preempted, some have two choices, and all answer as PEFT does."""
    max_model_len = 32
    names = [None, "adapter 0"] * 6
    params = [replace(GREEDY, n=2, temperature=1.0, seed=5) if i % 3 else GREEDY for i in range(12)]
    num_tokens = sum(asked.n for asked in params) * max_model_len // 2
    options = room(where, many, num_tokens=num_tokens, num_adapters=1)
    with Engine(model=str(many.directory), max_model_len=max_model_len, **options) as engine:
        loras = [name and LoRARequest(name, 1, str(many.adapters[name])) for name in names]
        prompts = [[5, 6, 7, 8]] * len(names)
        # A prediction that all outputs exceed.
        outputs = engine.generate(prompts, params, loras, predicted_output_tokens=1)
        assert engine.get_stats().num_preemptions > 0
    for name, asked, output in zip(names, params, outputs, strict=True):
        assert len(output.outputs) == asked.n
        error = largest_error(many, output, name, is_greedy=asked.temperature == 0)
        assert error < MAX_RELATIVE_ERROR

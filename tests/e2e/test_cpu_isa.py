"""``--cpu-isa``: an engine limited to fewer instructions than the machine has."""

import asyncio

import pytest
from corun import AsyncEngine, Engine, SamplingParams
from corun.cpu_workers.kernels.simd import isa
from corun.runtime.demo import chat_prompt
from corun.runtime.errors import ConfigError

_NAMES = [level.name for level in isa.LEVELS]
_BELOW = _NAMES[_NAMES.index(isa.process_isa().name) + 1 :]
_LOWER = "avx2" if "avx2" in _BELOW else next(iter(_BELOW), "auto")

pytestmark = pytest.mark.skipif(not _BELOW, reason="this machine has the lowest level")


def test_an_engine_of_its_own_process_is_held_to_a_level() -> None:
    async def ask() -> tuple[str, str]:
        # Kernels of this level are compiled first. Other tests are for those that are left out.
        async with AsyncEngine(
            own_process=True,
            device="cpu",
            cpu_isa=_LOWER,
            cpu_threads=1,
            linear_backend="numba",
            attention_backend="torch",
            lora_backend="torch",
            fused_kernels="off",
            decode_graphs="off",
        ) as engine:
            params = SamplingParams(temperature=0, max_tokens=32)
            text = ""
            async for output in engine.generate(chat_prompt("hello world"), params, lora_request="upper"):
                text += output.outputs[0].new_text
            return text, "\n".join(engine.get_model_info().summary)

    text, summary = asyncio.run(ask())
    assert text == "HELLO WORLD"
    assert f"CPU instructions {_LOWER}" in summary


def test_an_engine_in_somebodys_process_changes_nothing_of_it() -> None:
    with pytest.raises(ConfigError, match=rf"--cpu-isa {_LOWER} cannot be used: .*own_process=True"):
        Engine(device="cpu", cpu_isa=_LOWER)

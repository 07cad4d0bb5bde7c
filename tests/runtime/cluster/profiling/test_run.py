"""Measures a server with known times over HTTP."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from corun.profiles.meter import Report
from corun.profiles.profile import Profile, ProfileError, load_profile, save_profile
from corun.profiles.server import BaseModel
from corun.runtime.cli.main import main
from corun.runtime.cluster.engine_types.measured import given_card
from corun.runtime.cluster.profiling.run import ServerEffort, ServerTask, profile_server
from corun.runtime.server.errors import HttpError
from support.agents import KEY, serving
from support.profiles import any_fit
from support.recorded_vllm import BLOCK_SIZE, NUM_BLOCKS, RecordedVllm, VllmOptions

pytestmark = pytest.mark.usefixtures("own_logging")

BASE = BaseModel(
    fingerprint="f", dtype="bfloat16", num_layers=2, vocab_size=260, kv_bytes_per_token=512,
    targets=tuple(
        (f"model.layers.{layer}.self_attn.{name}_proj", 512, 512)
        for layer in range(2) for name in ("q", "v")
    ),
)  # fmt: skip
EFFORT = ServerEffort(
    name="quick", num_rounds=1, prefill_tokens=(16, 256, 1024), decode_rows=(1, 4, 64),
    ranks=(8, 32),
)  # fmt: skip
BYTES_PER_RANK = 4 * 1024 * 2
OPTIONS = VllmOptions(
    key=KEY, prefill_s=0.01, prefill_s_per_token=1e-4, decode_s=0.002, decode_s_per_row=0.0005,
    decode_s_per_byte=0.001 / (32 * BYTES_PER_RANK), load_s=0.02,
    load_s_per_byte=0.1 / (32 * BYTES_PER_RANK),
)  # fmt: skip


class Interrupted(Exception):  # noqa: N818 - no error, but an end
    """The measurement is interrupted."""


def task_of(tmp_path: Path, url: str, **changes: Any) -> ServerTask:
    task = ServerTask(
        url=url, key=KEY, base=BASE, base_name="tiny", adapters_dir=tmp_path / "adapters",
        kept_path=tmp_path / "p.json.part", effort=EFFORT, max_num_batched_tokens=512,
        max_num_seqs=4,
    )  # fmt: skip
    return replace(task, **changes)


def measure(
    tmp_path: Path, said: list[str], *, options: VllmOptions = OPTIONS,
    on_report: Callable[[Report], None] = lambda _: None, **changes: Any,
) -> tuple[Profile, RecordedVllm]:  # fmt: skip
    async def run() -> tuple[Profile, RecordedVllm]:
        server = RecordedVllm(options)
        async with serving(server.app()) as server.url:
            task = task_of(tmp_path, server.url, **changes)
            try:
                with any_fit():
                    return await profile_server(task, said.append, on_report), server
            finally:
                assert not server.loaded  # also after an interruption
                assert not list((tmp_path / "adapters").glob("*"))

    return asyncio.run(run())


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Profile, list[str]]:
    said: list[str] = []
    profile, _ = measure(tmp_path_factory.mktemp("measured"), said)
    return profile, said


def test_the_times_are_those_of_the_server(measured: tuple[Profile, list[str]]) -> None:
    model = measured[0].model
    assert model.decode_step_s is not None and model.lora.is_padded
    assert model.step_s.at(256) - model.step_s.at(16) == pytest.approx(0.024, rel=0.4)
    one_s, four_s = model.decode_step_s.at(1), model.decode_step_s.at(4)
    assert 0.002 < one_s < four_s < 0.03
    padded_s = model.lora.decode_s_per_byte * 4 * 32 * BYTES_PER_RANK
    assert 0.001 < padded_s + model.lora.decode_fixed_s < 0.03
    load_s = model.link.latency_s + 32 * BYTES_PER_RANK / model.link.bytes_per_s
    assert load_s == pytest.approx(0.12, rel=0.4)


def test_what_the_server_does_not_take_is_left_out(measured: tuple[Profile, list[str]]) -> None:
    profile, _ = measured
    assert profile.model.step_s.x == (16, 256, 511)  # 512 tokens with one of output
    assert profile.model.decode_step_s is not None
    assert profile.model.decode_step_s.x == (1, 4)  # --max-num-seqs
    assert [one.rank for one in profile.budgets] == [8, 32]
    assert profile.budgets[0].adapter_bytes == 8 * BYTES_PER_RANK
    assert profile.free_bytes == NUM_BLOCKS * BLOCK_SIZE * 512


def test_routers_and_simulations_take_it(
    measured: tuple[Profile, list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "p.json"
    save_profile(measured[0], path)
    with any_fit():
        _check_is_taken(measured[0], path, tmp_path, capsys)


def _check_is_taken(
    profile: Profile, path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert load_profile(path) == profile
    card = given_card(f"http://h:1,kind=vllm,profile={path}")
    assert card.measured is not None and card.measured.machine == profile.model
    assert card.measured.adapter_bytes_per_rank == BYTES_PER_RANK
    workload = tmp_path / "workload.yaml"
    workload.write_text(
        "rps: 5\nrequests: 20\nadapters: {number: 2, ranks: [8, 32]}\n"
        "lengths: {source: fixed, prompt_tokens: 100, output_tokens: 10}\n"
    )
    arguments = ("--profile", str(path), "--workload", str(workload), "--jobs", "1")
    assert main(("simulate", *arguments)) == 0, capsys.readouterr().err
    assert "vllm 0.32.0" in capsys.readouterr().out


def test_each_part_is_kept_and_not_measured_again(tmp_path: Path) -> None:
    def stop(report: Report) -> None:
        if report.what == "base model, decode behind long prompts":
            raise Interrupted

    said: list[str] = []
    with pytest.raises(Interrupted):
        measure(tmp_path, said, on_report=stop)
    kept = json.loads((tmp_path / "p.json.part").read_text())
    assert set(kept["times"]["prefill"]) == {"16", "256", "511"}
    whats: list[str] = []
    profile, _ = measure(tmp_path, said, on_report=lambda one: whats.append(one.what))
    assert said[-2] == "using parts of an earlier run: base model, prefill, base model, decode"
    assert "base model, prefill" not in whats and "loads of adapters" in whats
    assert profile.model.step_s.y[0] == pytest.approx(kept["times"]["prefill"]["16"][0])
    assert not (tmp_path / "p.json.part").exists()


def test_parts_of_another_server_are_none_of_this_one(tmp_path: Path) -> None:
    def stop(report: Report) -> None:
        if report.what == "base model, decode":
            raise Interrupted

    said: list[str] = []
    with pytest.raises(Interrupted):
        measure(tmp_path, said, on_report=stop)
    with pytest.raises(Interrupted):
        measure(tmp_path, said, on_report=stop, options=replace(OPTIONS, num_blocks=1000))
    assert not [one for one in said if "earlier run" in one]


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"has_lora": False}, HttpError, "start it with --enable-lora"),
        ({"updates_loras": False}, HttpError, "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True"),
        ({"max_lora_rank": 16}, ProfileError, "rank 32, and 2 .*--max-lora-rank.*greater"),
        ({"sees_files": False}, ProfileError, "does not see .*; give --adapters-dir"),
        ({"max_model_len": 64}, ProfileError, "which are too few to measure it"),
    ],
)
def test_what_cannot_be_measured_is_said_in_one_line(
    tmp_path: Path, options: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words) as refused:
        measure(tmp_path, [], options=replace(OPTIONS, **options))
    assert "\n" not in str(refused.value)

"""Mixes: what names and scales are valid, and which adapters add up."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from corun.gpu.model.targets import build_target_map
from corun.runtime.adapters.conventions import NO_CONVENTIONS, AdapterConventions
from corun.runtime.adapters.load import OpenAdapter, open_adapter
from corun.runtime.adapters.load_mix import OpenMix, open_mix
from corun.runtime.adapters.mix import LoRAMix, conventions_of_mix
from corun.runtime.adapters.resolved import MixSource, PartSource, StoredTensor
from corun.runtime.errors import AdapterError, RequestError
from support.architectures import make_model
from support.peft_adapters import edit_config, edit_tensors, save_adapter

_TARGET_MAP = build_target_map(make_model("llama3-rope"))


def open_part(path: str) -> OpenAdapter:
    return open_adapter(Path(path), _TARGET_MAP, max_rank=64)


def source_of(directory: Path, scales: Sequence[float], **second: Any) -> MixSource:
    """The first adapter is "a"; ``second``: options of the second one, which is "b"."""
    save_adapter(directory / "a", r=4)
    save_adapter(directory / "b", **{"seed": 1, "r": 6} | second)
    parts = []
    for name, scale in zip("ab", scales, strict=True):
        with open_part(str(directory / name)) as part:
            list(part.read_layers(lambda tensors: None))
            digest = part.digest.hexadecimal
        parts.append(PartSource(name, str(directory / name), digest, scale))
    return MixSource(tuple(parts), NO_CONVENTIONS)


def read(mix: OpenMix) -> dict[str, np.ndarray]:
    found = {}

    def keep(tensors: Sequence[StoredTensor]) -> None:
        for raw, data in tensors:
            found[raw.name] = np.frombuffer(bytes(data), np.float32).reshape(raw.shape)

    with mix:
        list(mix.read_layers(keep))
    return found


def test_a_name_says_all_and_has_one_order() -> None:
    mix = LoRAMix([("b/c", -0.1), ("a*2", 3)])
    assert mix.parts == (("a*2", 3.0), ("b/c", -0.1))
    assert mix == LoRAMix(reversed(mix.parts)) == LoRAMix.named(mix.lora_name)
    assert LoRAMix.named("a") is None
    assert LoRAMix([("a", 1)]).lora_name == "a"
    assert LoRAMix([("a", 2)]).lora_name != "a"


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([], "0 adapters"),
        ([(name, 1) for name in "abcde"], "5 adapters, must have 1 to 4"),
        ([("a", 1), ("b", 1), ("a", 2)], "'a' twice"),
        ([("a", 1), ("b", 0)], "scale 0 for 'b'"),
        *[
            ([("a", scale)], "scale .* for 'a'")
            for scale in (math.nan, math.inf, -math.inf, 1e30, 100.5, -0.0)
        ],
        ([("", 1)], "name ''"),
        ([("a:1.0:b", 1)], "no adapter can have"),
    ],
)
def test_bad_parts_are_refused(parts: list[tuple[str, float]], message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        LoRAMix(parts)
    assert caught.value.param == "lora"


def test_conventions_are_those_of_the_parts_that_have_any() -> None:
    one, other = (AdapterConventions(template=text, digest=text) for text in ("x", "y"))
    assert conventions_of_mix([("a", NO_CONVENTIONS)]) == NO_CONVENTIONS
    assert conventions_of_mix([("a", NO_CONVENTIONS), ("b", one), ("c", one)]) == one
    with pytest.raises(RequestError, match="'a' and 'c', which have different chat templates"):
        conventions_of_mix([("a", one), ("b", NO_CONVENTIONS), ("c", other)])


def test_matrices_lie_beside_each_other(tmp_path: Path) -> None:
    source = source_of(tmp_path, (0.5, -2.0), target_modules=["v_proj", "down_proj"])
    mix = open_mix(source, open_part, max_rank=10)
    assert {lora.rank for lora in mix.adapter.targets} == {4, 6, 10}
    assert {lora.scaling for lora in mix.adapter.targets} == {1.0}
    found = read(mix)
    assert len(found) == 2 * len(mix.adapter.targets) == 2 * 2 * 3
    again = open_mix(source, open_part, max_rank=10)
    again.expect(mix.digest)
    assert read(again).keys() == found.keys()
    other = open_mix(MixSource(source.parts[:1], NO_CONVENTIONS), open_part, max_rank=10)
    read(other)
    assert len({one.digest.hexadecimal for one in (mix, again, other)}) == 2


@pytest.mark.parametrize(
    ("second", "base", "message"),
    [
        ({"r": 7}, None, "ranks of 'a', 'b' are 11 together .* 10 are served .--max-lora-rank"),
        ({"use_dora": True}, None, "'b' is a DoRA adapter"),
        ({"trainable_token_indices": [3]}, None, "'b' has rows of tokens of its own"),
        ({}, "them/other-8b", "two bases: 'a' for us/model-7b-AWQ, 'b' for them/other-8b"),
        ({}, "/elsewhere/Model-7B", None),
        ({}, None, None),
    ],
)
def test_parts_that_do_not_add_up(
    second: dict[str, Any], base: str | None, message: str | None, tmp_path: Path
) -> None:
    source = source_of(tmp_path, (1.0, 1.0), **second)
    edit_config(tmp_path / "a", base_model_name_or_path="us/model-7b-AWQ")
    edit_config(tmp_path / "b", base_model_name_or_path=base)
    if message is None:
        open_mix(source, open_part, max_rank=10).close()
        return
    with pytest.raises(AdapterError, match=message):
        open_mix(source, open_part, max_rank=10)


def test_a_part_with_other_files_than_its_version_is_refused(tmp_path: Path) -> None:
    source = source_of(tmp_path, (1.0, 1.0))
    edit_tensors(tmp_path / "b", layers__1__self_attn__q_proj__lora_A=lambda tensor: tensor * 2)
    with pytest.raises(AdapterError, match="changed since adapter 'b' was registered"):
        read(open_mix(source, open_part, max_rank=10))

"""The digest of content: the part that each difference changes."""

from typing import Any

import pytest
from corun.runtime.adapters.digest import (
    ContentDigest,
    LateDigests,
    LayerDigest,
    TensorKind,
    digest_head,
    part_head,
)
from corun.runtime.adapters.lora_spec import LoraSpec

KINDS: list[TensorKind] = [("a", "F32", (2,)), ("b", "F32", (3,))]


def spec(**fields: Any) -> LoraSpec:
    values = {"r": 8, "lora_alpha": 16.0, "use_rslora": False, "target_modules": ("q",), **fields}
    return LoraSpec(**values)


def head(*kinds: TensorKind, **fields: Any) -> bytes:
    return digest_head(spec(**fields).effective_fields(), kinds)


def layer(*tensors: bytes) -> bytes:
    digest = LayerDigest()
    for data in tensors:
        digest.add(memoryview(part_head(len(data)) + data))
    return digest.digest()


def test_late_digests_are_those_of_all_that_was_added() -> None:
    """Also of more than the memory holds, and of a part that is larger than it."""
    mib = 1 << 20
    parts = [(0, 8), (0, 20 * mib), (1, 20 * mib), (1, 33 * mib), (1, 0), (2, mib), (2, 1)]
    wanted = [LayerDigest() for _ in range(4)]
    with LateDigests(4) as late:
        for number, (layer_number, num_bytes) in enumerate(parts):
            data = bytes([number]) * num_bytes
            wanted[layer_number].add(memoryview(data))
            room = late.room(num_bytes)
            assert room.nbytes == num_bytes
            room[:] = data
            late.add(layer_number, room)
        assert late.digests() == [one.digest() for one in wanted]


def test_memory_of_late_digests_is_used_again_by_one_at_a_time() -> None:
    with LateDigests(1) as first, LateDigests(1) as second:
        first.room(1)[0], second.room(1)[0] = 1, 2
        own = first.room(1)
        own[0] = 3
        second.room(1)[0] = 4
        assert own[0] == 3
    with LateDigests(1) as third:
        assert third.room(1)[0] in (1, 2), "the memory of one of them"


def test_the_order_in_the_file_and_fields_without_effect_do_not_enter() -> None:
    assert head(*KINDS) == head(*reversed(KINDS), base_model_name_or_path="x")


@pytest.mark.parametrize(
    "kinds",
    [
        [("a", "F32", (2,)), ("c", "F32", (3,))],
        [("a", "F32", (2,)), ("b", "F32", (3, 1))],
        [("a", "F32", (2,)), ("b", "I32", (3,))],
        [("a", "F32", (2,))],
    ],
)
def test_the_head_sees_names_shapes_and_types(kinds: list[TensorKind]) -> None:
    assert head(*kinds) != head(*KINDS)


def test_the_head_sees_the_scaling() -> None:
    heads = {
        head(*KINDS, **fields)
        for fields in (
            {},
            {"lora_alpha": 17.0},
            {"use_rslora": True},
            {"rank_pattern": (("q", 4),)},
            {"layers_to_transform": (0,)},
        )
    }
    assert len(heads) == 5


def test_a_layer_sees_its_values_and_where_a_tensor_ends() -> None:
    assert len({layer(b"ab", b"c"), layer(b"a", b"bc"), layer(b"abc"), layer(b"ab", b"d")}) == 4
    assert layer(b"ab", b"c") == layer(b"ab", b"c")


def test_the_whole_sees_every_part_and_their_order() -> None:
    one, two = layer(b"1"), layer(b"2")
    digests = [
        ContentDigest(head(*KINDS), (one, two)),
        ContentDigest(head(*KINDS), (two, one)),
        ContentDigest(head(*KINDS), (one,)),
        ContentDigest(head(*KINDS[:1]), (one, two)),
    ]
    assert len({digest.hexadecimal for digest in digests}) == 4
    assert all(len(digest.hexadecimal) == 64 for digest in digests)

"""Messages between the processes of a cluster: genuine ones, damaged ones, and any bytes."""

import dataclasses
import inspect
import json
import types
import typing
from typing import Any

import msgspec
import pytest
from corun.profiles.models import MachineModel
from corun.runtime.cluster import wire
from corun.runtime.cluster.wire import EngineProfile, EngineState, decode
from corun.runtime.engine_state import Wire
from corun.runtime.server.errors import ErrorBody
from hypothesis import given
from hypothesis import strategies as st
from support.damage import JSON_VALUES, damaged, few_and_many
from support.fake_cluster import profile_of

KINDS = [
    one for _, one in inspect.getmembers(wire, inspect.isclass) if issubclass(one, Wire) and one is not Wire
]
NUM_CASES = [30, pytest.param(3000, marks=pytest.mark.full)]
_INTEGERS = st.integers(-(2**63), 2**64 - 1)
_FLOATS = st.floats(allow_nan=False, allow_infinity=False)
_SIMPLE: dict[Any, st.SearchStrategy[Any]] = {
    str: st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
    int: _INTEGERS,
    float: _FLOATS,
    bool: st.booleans(),
    types.NoneType: st.none(),
    msgspec.UnsetType: st.just(msgspec.UNSET),
    MachineModel: st.just(profile_of().machine),
}


def values_of(hint: Any) -> st.SearchStrategy[Any]:
    """Return values of a field's type."""
    arguments = typing.get_args(hint)
    if hint in _SIMPLE:
        return _SIMPLE[hint]
    if isinstance(hint, types.UnionType):
        return st.one_of([values_of(one) for one in arguments])
    if typing.get_origin(hint) is tuple:
        return st.lists(values_of(arguments[0]), max_size=2).map(tuple)
    if typing.get_origin(hint) is dict:
        return st.dictionaries(values_of(arguments[0]), values_of(arguments[1]), max_size=2)
    assert dataclasses.is_dataclass(hint) or issubclass(hint, msgspec.Struct), hint
    fields = typing.get_type_hints(hint)
    return st.builds(hint, **{name: values_of(one) for name, one in fields.items()})


def test_all_messages_are_tested() -> None:
    assert {EngineState, EngineProfile, wire.TableChange, wire.Manifest} <= set(KINDS)


@pytest.mark.parametrize("num_cases", NUM_CASES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_message_arrives_as_it_was_sent(kind: type[Wire], num_cases: int) -> None:
    @few_and_many(num_cases)
    @given(message=values_of(kind))
    def check(message: Wire) -> None:
        assert decode(msgspec.json.encode(message), kind) == message

    check()


@pytest.mark.parametrize("num_cases", NUM_CASES)
@pytest.mark.parametrize("kind", [*KINDS, ErrorBody])
def test_damaged_messages_are_of_their_kind_or_refused(kind: type[Any], num_cases: int) -> None:
    @few_and_many(num_cases)
    @given(data=values_of(kind).map(msgspec.json.encode).flatmap(damaged))
    def check(data: bytes) -> None:
        try:
            message = decode(data, kind)
        except msgspec.DecodeError as error:
            assert len(str(error)) < 1000
        else:
            assert isinstance(message, kind)
            assert decode(msgspec.json.encode(message), kind) == message

    check()


@pytest.mark.parametrize("num_cases", NUM_CASES)
@pytest.mark.parametrize("kind", KINDS)
def test_any_fields_are_of_their_kind_or_refused(kind: type[Wire], num_cases: int) -> None:
    names = st.sampled_from([*kind.__struct_fields__, "unknown"])

    @few_and_many(num_cases)
    @given(fields=st.dictionaries(names, JSON_VALUES, max_size=4))
    def check(fields: dict[str, Any]) -> None:
        try:
            message = decode(json.dumps(fields).encode(), kind)
        except msgspec.DecodeError:
            return
        assert isinstance(message, kind)

    check()


@pytest.mark.parametrize("kind", [wire.Join, EngineState])
@pytest.mark.parametrize("field", ["unknown", "adapters", "controller_url"])
@pytest.mark.parametrize("bracket", [b"[", b'{"a":'])
def test_very_many_levels_are_refused(kind: type[Wire], field: str, bracket: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        decode(b'{"%b":' % field.encode() + bracket * 1_000_000, kind)

import itertools

from corun.runtime.memory.namespace import kv_namespace


def test_equal_inputs_share_and_any_difference_separates() -> None:
    variants = [
        ("base", "bfloat16", (), ""),
        ("base2", "bfloat16", (), ""),
        ("base", "float16", (), ""),
        ("base", "bfloat16", (), "tenant"),
        ("base", "bfloat16", (("d1", 1.0),), ""),
        ("base", "bfloat16", (("d1", 0.5),), ""),
        ("base", "bfloat16", (("d2", 1.0),), ""),
        ("base", "bfloat16", (("d1", 1.0), ("d2", 1.0)), ""),
        ("base", "bfloat16", (("d2", 1.0), ("d1", 1.0)), ""),
    ]
    names = [kv_namespace(*variant) for variant in variants]
    assert [kv_namespace(*variant) for variant in variants] == names
    assert len(set(names)) == len(names)
    assert {len(name) for name in names} == {32}


def test_fields_cannot_run_into_each_other() -> None:
    splits = [
        ("ab", "c", "d"),
        ("a", "bc", "d"),
        ("a", "b", "cd"),
        ("abc", "", "d"),
        ("", "", "abcd"),
    ]
    names = [kv_namespace(base, dtype, (), salt) for base, dtype, salt in splits]
    for one, other in itertools.combinations(names, 2):
        assert one != other
    with_adapter = kv_namespace("a", "b", (("c", 0.0),), "")
    assert with_adapter != kv_namespace("a", "b", (), "c" + "\0" * 8)

"""Remarks on adapters that name another base than the served one."""

import logging

import pytest
from corun.runtime.adapters.base_names import BaseRemarks, ServedBase, name_in

QWEN = "Qwen/Qwen2.5-7B-Instruct"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize(
    ("path", "name"),
    [
        (QWEN, "qwen2.5-7b-instruct"),
        ("/data/models/Qwen2.5-7B-Instruct/", "qwen2.5-7b-instruct"),
        ("C:\\models\\gpt2", "gpt2"),
        (f"/home/x/.cache/hub/models--Qwen--Qwen2.5-7B/snapshots/{COMMIT}", "qwen2.5-7b"),
        (f"/cache/{COMMIT}", None),
        ("/runs/7/checkpoint-500", None),
        ("./outputs/final_model", None),
        ("/models/base", None),
        ("model", None),
        ("/srv/m2", None),
        ("..", None),
        ("", None),
        (None, None),
    ],
)
def test_the_name_in_a_path(path: str | None, name: str | None) -> None:
    assert name_in(path) == name


def remark(served: str, named: str | None, *, is_quantized: bool = False) -> str | None:
    return ServedBase((served,), is_quantized).remark(named)


@pytest.mark.parametrize(
    ("served", "named"),
    [
        (QWEN, QWEN),
        (QWEN, "/mnt/qwen2.5-7b-instruct"),
        (QWEN, None),
        (QWEN, "/runs/checkpoint-12"),
        (f"/cache/{COMMIT}", QWEN),  # nothing is known of it
        ("/models/model", QWEN),
        (f"/models/{'1' * 64}", QWEN),  # a number
        ("unsloth/Meta-Llama-3.1-8B", "meta-llama/Llama-3.1-8B"),
        ("unsloth/Qwen2.5-7B-Instruct-bnb-4bit", QWEN),
        ("Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4", QWEN),
    ],
)
def test_nothing_is_said_of_the_same_base(served: str, named: str | None) -> None:
    assert remark(served, named) is None


@pytest.mark.parametrize(
    "named",
    [
        "Qwen/Qwen2.5-7B",  # no suffix of quantisation
        "Qwen/Qwen2.5-7B-bnb-4bit",
        "meta-llama/Llama-3.1-8B-Instruct",
        "Qwen/Qwen2.5-14B-Instruct",
        f"Qwen/{'1' * 64}-{'run' * 32}x",  # compared in no time
    ],
)
@pytest.mark.parametrize("served", [QWEN, f"{QWEN}-AWQ"])
def test_another_base_is_named(served: str, named: str) -> None:
    found = remark(served, named)
    assert found is not None
    assert found.startswith(f"made for {named}, not for the base model that is served (qwen2.5")


@pytest.mark.parametrize(
    ("suffix", "kind"),
    [
        ("-bnb-4bit", "an nf4"),
        ("-unsloth-bnb-4bit", "an nf4"),
        ("-nf4", "an nf4"),
        ("-GPTQ", "a quantised"),
        ("-AWQ", "a quantised"),
        ("-4bit", "a quantised"),
        ("-FP8", "a quantised"),
        ("-FP8-dynamic", "a quantised"),
        ("-GPTQ-4bit-128g", "a quantised"),
        ("-quantized.w4a16", "a quantised"),
    ],
)
def test_a_quantised_copy_is_named(suffix: str, kind: str) -> None:
    named = f"unsloth/Qwen2.5-7B-Instruct{suffix}"
    found = f"trained over {named}, {kind} copy of the base model, which is served in full"
    assert remark(QWEN, named) == found
    assert remark(named, named, is_quantized=True) is None
    assert remark(f"/models/qwen2.5-7b-instruct{suffix}", named, is_quantized=True) is None


def test_any_name_of_the_base_will_do() -> None:
    served = ServedBase(("/models/ours", "", QWEN), is_quantized=False)
    assert served.remark(QWEN) is None
    assert served.remark("x/ours") is None
    assert served.remark("x/other") is not None


def test_each_name_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    remarks = BaseRemarks(ServedBase((QWEN,), is_quantized=False))
    for number in range(3):
        for named in ("a/one", "a/two", QWEN, None):
            remarks.log(f"/adapters/{number}", named)
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 2
    assert "/adapters/0 is made for a/one" in caplog.text
    assert "/adapters/0 is made for a/two" in caplog.text

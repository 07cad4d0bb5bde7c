"""Parts of an answer become items, and events from which a client makes the same items."""

from typing import Any

import msgspec
import pytest
from corun.runtime.server.response_endpoint import ItemAssembler
from corun.runtime.server.response_objects import ResponseObject
from corun.runtime.tools.parts import AnswerPart, CallHead, PartKind

C, R = PartKind.CONTENT, PartKind.REASONING
RESPONSE = ResponseObject(
    id="resp-1",
    created_at=1,
    model="m",
    instructions=None,
    tools=(),
    tool_choice="auto",
    parallel_tool_calls=True,
    text={},
    reasoning={},
    max_output_tokens=None,
    temperature=1.0,
    top_p=1.0,
    metadata={},
)


def call(index: int, *pieces: str) -> list[AnswerPart]:
    head = CallHead(f"call_{index}", f"f{index}")
    first = AnswerPart(PartKind.CALL, "", index, head)
    return [first, *(AnswerPart(PartKind.CALL, piece, index) for piece in pieces)]


ANSWERS: dict[str, tuple[list[AnswerPart], list[str]]] = {
    "text": ([AnswerPart(C, "a"), AnswerPart(C, "b")], ["message:ab"]),
    "nothing": ([], ["message:"]),
    "space alone": ([AnswerPart(C, " \n")], ["message: \n"]),
    "space is kept": ([AnswerPart(C, " "), AnswerPart(C, "a")], ["message: a"]),
    "reasoning": (
        [AnswerPart(R, "x"), AnswerPart(R, "y"), AnswerPart(C, "\n"), AnswerPart(C, "z")],
        ["reasoning:xy", "message:\nz"],
    ),
    "space before a call": (
        [AnswerPart(R, "x"), AnswerPart(C, "\n\n"), *call(0, "{", "}")],
        ["reasoning:x", "function_call:f0{}"],
    ),
    "calls": (
        [AnswerPart(C, "I call"), *call(0, '{"a":', "1}"), *call(1, "{}")],
        ["message:I call", 'function_call:f0{"a":1}', "function_call:f1{}"],
    ),
}


def shown(item: Any) -> str:
    """A short text of an item as JSON."""
    if item["type"] == "function_call":
        return f"function_call:{item['name']}{item['arguments']}"
    return f"{item['type']}:" + "".join(part["text"] for part in item["content"])


def events_of(parts: list[AnswerPart], *, is_complete: bool = True) -> tuple[Any, Any]:
    """The events of an answer and its items, as clients read them."""
    items = ItemAssembler("resp-1")
    events = [*items.begin(RESPONSE)]
    for part in parts:
        events += items.add([part])
    events += items.end(is_complete=is_complete)
    read = msgspec.json.decode
    return read(msgspec.json.encode(events)), read(msgspec.json.encode(items.items))


@pytest.mark.parametrize("name", ANSWERS)
def test_items(name: str) -> None:
    parts, expected = ANSWERS[name]
    events, items = events_of(parts)
    assert [shown(item) for item in items] == expected
    assert {item["status"] for item in items} == {"completed"}
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    ended = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert ended == items
    assert len({item["id"] for item in items}) == len(items)


@pytest.mark.parametrize("name", ANSWERS)
def test_deltas_are_the_texts_of_their_items(name: str) -> None:
    events, items = events_of(ANSWERS[name][0])
    texts = [""] * len(items)
    for event in events:
        if event["type"].endswith(".delta"):
            assert event["item_id"] == items[event["output_index"]]["id"]
            texts[event["output_index"]] += event["delta"]
    ends = [event for event in events if event["type"].endswith(("_text.done", "arguments.done"))]
    done = [event.get("text", event.get("arguments")) for event in ends]
    assert texts == done
    begun = [event["output_index"] for event in events if event["type"].endswith("item.added")]
    assert begun == list(range(len(items)))


def test_a_cut_answer_ends_with_an_incomplete_item() -> None:
    _, items = events_of([AnswerPart(R, "x"), AnswerPart(C, "z")], is_complete=False)
    assert [item["status"] for item in items] == ["completed", "incomplete"]

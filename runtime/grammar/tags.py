"""Structural tags with triggers that are tokens of their own. Pure.

Free text has no special tokens, so a grammar must name a trigger that is one by its id.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace

from ..sampling import StructuredOutput

TRIGGER_IDS = "trigger_ids"


def with_trigger_ids(
    structured: StructuredOutput, added_tokens: Callable[[], Mapping[int, str]]
) -> StructuredOutput:
    """Return structural tags with the ids of their triggers; other kinds as they are.

    ``added_tokens``: returns the tokens that the tokenizer finds as a whole, by id. Mistakes in the
    tags are left to the compilation.
    """
    if structured.kind != "structural_tag":
        return structured
    try:
        tag = json.loads(structured.text)
        triggers = set(tag["triggers"])
    except (ValueError, LookupError, TypeError, RecursionError):
        return structured
    ids = {content: token for token, content in added_tokens().items() if content in triggers}
    return replace(structured, text=json.dumps({**tag, TRIGGER_IDS: ids}))

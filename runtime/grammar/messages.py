"""Messages to the process that tries grammars: 4 bytes of length, then MessagePack."""

import msgspec

LENGTH_BYTES = 4


class GrammarTokens(msgspec.Struct, frozen=True, array_like=True):
    """The tokens that a grammar may name."""

    num_ids: int  # of the model's logits
    special_tokens: dict[int, str]  # names by id


def frame(message: object) -> bytes:
    """Return ``message`` with its length."""
    payload = msgspec.msgpack.encode(message)
    return len(payload).to_bytes(LENGTH_BYTES, "little") + payload

"""The bytes behind a token's name in the two notations that vocabularies use for them. Pure."""

import re
from functools import cache

_BYTE_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@cache
def _byte_level_alphabet() -> dict[str, int]:
    """Return which character stands for which byte in byte-level BPE.

    Bytes that Latin-1 prints stand for themselves, the others follow from U+0100 in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in printable)
    alphabet.update((chr(0x100 + index), byte) for index, byte in enumerate(others))
    return alphabet


def token_bytes(name: str | None) -> bytes | None:
    """Return the bytes that a vocabulary entry stands for; None if its name does not tell."""
    if name is None:
        return None
    fallback = _BYTE_FALLBACK.fullmatch(name)
    if fallback is not None:
        return bytes([int(fallback[1], 16)])
    alphabet = _byte_level_alphabet()
    try:
        return bytes(alphabet[character] for character in name)
    except KeyError:
        return None

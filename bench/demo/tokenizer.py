"""The demo's tokenizer: one token per byte, a few special ones, and a chat template.

A byte's token id is its value, so the training text is encoded without this tokenizer; the one that
is saved for users gives the same ids.
"""

from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from demo.chat import CHAT_TEMPLATE, END, END_OF_TEXT, NUM_BYTES, PAD, SPECIAL_TOKENS


def _byte_characters() -> list[str]:
    """The printable character that stands for each byte value in byte-level vocabularies.

    Printable Latin-1 characters stand for themselves; the others are moved, in order, behind 255.
    """
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = (value for value in range(NUM_BYTES) if value not in printable)
    moved = {value: NUM_BYTES + place for place, value in enumerate(others)}
    return [chr(moved.get(value, value)) for value in range(NUM_BYTES)]


def build_tokenizer(max_length: int) -> PreTrainedTokenizerFast:
    """The tokenizer; any UTF-8 text survives encoding and decoding unchanged."""
    vocabulary = {character: value for value, character in enumerate(_byte_characters())}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=END_OF_TEXT,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[t for t in SPECIAL_TOKENS if t not in (END_OF_TEXT, END, PAD)],
        chat_template=CHAT_TEMPLATE,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )


def save_tokenizer(directory: Path, max_length: int) -> None:
    """Writes the tokenizer's files, from which ``AutoTokenizer`` makes it again."""
    build_tokenizer(max_length).save_pretrained(directory)

"""Tokenizers for test models, made on the spot."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

WORDS = ("Hello", "world", "hello", "the", "tokens", "can", "'t", "don", "123", "café", "中文")


def save_word_tokenizer(directory: Path, vocab_size: int) -> None:
    """Save a tokenizer with the words "t0", "t1", ... and their numbers as ids."""
    vocab = {f"t{i}": i for i in range(vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="t2", unk_token="t0")
    fast.save_pretrained(directory)


def save_sample_tokenizer(kind: str, directory: Path, **options: Any) -> None:
    """Save a tokenizer of a ``kind`` that models have, as files that name no class of it.

    It begins texts with a special token, has one that ends them, and one that is only added.
    ``options``: more entries of tokenizer_config.json.
    """
    backend, names = SAMPLE_KINDS[kind]()
    backend.add_special_tokens([AddedToken(name, special=True) for name in names.values()])
    backend.add_tokens([AddedToken("<tool>", lstrip=True, rstrip=True, normalized=False)])
    begin = names.get("bos_token", names.get("cls_token", ""))
    end = names.get("sep_token", "")
    backend.post_processor = processors.TemplateProcessing(
        single=f"{begin} $A {end}".strip(),
        special_tokens=[(name, backend.token_to_id(name)) for name in (begin, end) if name],
    )
    directory.mkdir(parents=True, exist_ok=True)
    backend.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({**names, **options}))


def run_tokenizer(longest: int) -> Tokenizer:
    """Return a byte-level tokenizer with tokens of 2, 4, ... ``longest`` spaces, and few words."""
    tokenizer, _ = _byte_level()
    model = json.loads(tokenizer.to_str())["model"]
    vocab = dict(model["vocab"])
    merges = [tuple(pair) for pair in model["merges"]]
    length = 1
    while length < longest:
        piece = "Ġ" * length
        vocab.setdefault(2 * piece, len(vocab))
        merges.append((piece, piece))
        length *= 2
    tokenizer.model = models.BPE(vocab=vocab, merges=merges)
    return tokenizer


def _byte_level() -> tuple[Tokenizer, dict[str, str]]:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words = [
        piece
        for word in WORDS
        for text in (word, f" {word}")
        for piece, _ in pre_tokenizer.pre_tokenize_str(text)
    ]
    tokenizer = Tokenizer(_merged(alphabet, words))
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, {"bos_token": "<|begin|>", "eos_token": "<|end|>"}


def _sentencepiece() -> tuple[Tokenizer, dict[str, str]]:
    names = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    fallback = [f"<0x{byte:02X}>" for byte in range(256)]
    letters = sorted({letter for word in WORDS for letter in word} | {"▁"})
    words = [piece for word in WORDS for piece in (word, f"▁{word}")]
    model = _merged(
        [*names.values(), *fallback, *letters], words, fuse_unk=True, byte_fallback=True, unk_token="<unk>"
    )
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = _sentencepiece_decoder()
    return tokenizer, names


def _unigram() -> tuple[Tokenizer, dict[str, str]]:
    names = {"unk_token": "<unk>", "sep_token": "</s>"}
    pieces = ["<unk>", "</s>", "▁", *map(chr, range(0x21, 0x7F)), *(f"▁{word}" for word in WORDS)]
    scores = [(piece, -1.0 - number / 64) for number, piece in enumerate(pieces)]
    tokenizer = Tokenizer(models.Unigram(scores, unk_id=0))
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer, names


def _wordpiece() -> tuple[Tokenizer, dict[str, str]]:
    names = {"unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    letters = "abcdefghijklmnopqrstuvwxyz0123456789"
    words = dict.fromkeys(word.lower() for word in WORDS)
    pieces = [*names.values(), *words, *letters, *(f"##{letter}" for letter in letters), ".", ","]
    vocab = {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer, names


SAMPLE_KINDS: dict[str, Callable[[], tuple[Tokenizer, dict[str, str]]]] = {
    "byte level": _byte_level,
    "sentencepiece": _sentencepiece,
    "unigram": _unigram,
    "wordpiece": _wordpiece,
}


def _sentencepiece_decoder() -> decoders.Decoder:
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    return decoders.Sequence(parts)


def _merged(first: Iterable[str], words: Iterable[str], **options: Any) -> models.BPE:
    """A model that merges these words letter by letter."""
    vocab = {piece: number for number, piece in enumerate(first)}
    merges = []
    for word in words:
        for length in range(2, len(word) + 1):
            if word[:length] not in vocab:
                vocab[word[:length]] = len(vocab)
                merges.append((word[: length - 1], word[length - 1]))
    return models.BPE(vocab=vocab, merges=merges, **options)

"""Tokenizers for test models, made on the spot."""

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


def save_word_tokenizer(directory: Path, vocab_size: int) -> None:
    """Save a tokenizer whose words are "t0", "t1", ... and whose ids are their numbers."""
    vocab = {f"t{i}": i for i in range(vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="t2", unk_token="t0")
    fast.save_pretrained(directory)

"""The demo that corun serves when no model is named: a tiny language model and four adapters.

``bench/train_demo.py`` in corun's repository made its files.
"""

from pathlib import Path

_DATA_PATH = Path(__file__).parent / "data"


def demo_model_path() -> Path:
    """Directory of the packaged base model, as ``from_pretrained`` takes it."""
    return _DATA_PATH / "corun-demo"


def demo_adapters_path() -> Path:
    """Directory that holds one PEFT adapter directory per task, named after it."""
    return _DATA_PATH / "adapters"


def demo_text_path() -> Path:
    """Stories of the kind that the demo has read, to compare weights in fewer bits on."""
    return _DATA_PATH / "sample.txt"


def chat_prompt(text: str) -> str:
    """What the chat template makes of one user message: the prompt for plain completions."""
    return f"<|user|>{text}<|assistant|>"

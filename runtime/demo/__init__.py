"""The demo that corun serves without a model argument: a tiny language model and five adapters.

``bench/train_demo.py`` in corun's repository makes its files.
"""

from pathlib import Path

_DATA_PATH = Path(__file__).parent / "data"


def demo_model_path() -> Path:
    """Directory of the packaged base model, for ``from_pretrained``."""
    return _DATA_PATH / "corun-demo"


def demo_adapters_path() -> Path:
    """Directory with one PEFT adapter directory per task, named after the task."""
    return _DATA_PATH / "adapters"


def demo_text_path() -> Path:
    """Stories like those of the demo's training, to compare quantised weights on."""
    return _DATA_PATH / "sample.txt"


def chat_prompt(text: str) -> str:
    """One user message rendered by the chat template: the prompt for plain completions."""
    return f"<|user|>{text}<|assistant|>"

"""corun: many LoRA adapters over one base LLM, on the accelerator and the CPU beside it."""

__version__ = "0.1.0"

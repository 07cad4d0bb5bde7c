"""A wrapper with parts for images and sound that embed tokens; it calls them for text, too."""

from pathlib import Path
from typing import Any

import pytest
from corun.runtime.model_trials.outcome import Parity
from corun.runtime.model_trials.trial import try_model
from torch import nn
from transformers.models.gemma3n import modeling_gemma3n


class _Tower(nn.Module):
    """In place of a tower that needs a package of images."""

    def __init__(self) -> None:
        super().__init__()
        self.projection = nn.Linear(4, 4)


@pytest.mark.usefixtures("one_torch_thread")
def test_gemma3n_with_images_and_sound_is_exact_for_text(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    make = modeling_gemma3n.AutoModel.from_config

    def from_config(config: Any, *inputs: Any, **named: Any) -> nn.Module:
        is_of_images = config.model_type == "gemma3n_vision"
        return _Tower() if is_of_images else make(config, *inputs, **named)

    monkeypatch.setattr(modeling_gemma3n.AutoModel, "from_config", from_config)
    trial = try_model("gemma3n", tmp_path)
    assert trial.outcomes == (Parity.EXACT,) * 4, trial

"""Chooses whether decode passes of a model may be captured and replayed."""

import logging
from collections.abc import Mapping

from ..fused import residual
from .replay_kernel import replay

_LOG = logging.getLogger(__name__)

_KERNELS = ("attention", "LoRA")
OFF, ONCE_VERIFIED = "off", "once verified"


def select_decode_graphs(name: str, backend_names: Mapping[str, str]) -> str:
    """Whether decode passes may be replayed; returns ``OFF`` or ``ONCE_VERIFIED``, for logs.

    Which passes can be replayed is known only when they are captured, while requests run.

    ``backend_names``: by part. All parts not computed by torch must be kernels that are called
    through the launcher.
    """
    others = [f"{what} {backend_names[what]}" for what in _KERNELS if backend_names[what] != "numba"]
    if name == "off":
        others = ["configured"]
    if others:
        _LOG.info("decode graphs: off (%s)", ", ".join(others))
        return OFF
    # A capture compiles these in addition to the kernels in use; at start no token waits for it.
    replay(0, 0)
    residual.compile_kernel()
    return ONCE_VERIFIED

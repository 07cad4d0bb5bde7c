"""Tells transformers what a process of corun's own does without, so that it is not imported.

* torch's distributed tensors, half a second, are for models that are spread over processes; corun
  has a model in one.
* torch itself, over a second and 200 MiB, is not needed by tokenizers, which are all that a server
  next to its engine process uses of transformers. It can still be imported by who asks for it.
"""

import functools
import logging
from types import ModuleType

from .amend import amend_when_imported

_LOG = logging.getLogger(__name__)

_MODULE = "transformers.utils.import_utils"


def leave_out_distributed() -> None:
    """Let a later import of transformers in this process see no ``torch.distributed``."""
    amend_when_imported(_MODULE, functools.partial(_deny, "is_torch_distributed_available"))


def leave_out_torch() -> None:
    """Let a later import of transformers in this process see no torch."""
    amend_when_imported(_MODULE, functools.partial(_deny, "is_torch_available"))
    logging.getLogger("transformers").addFilter(_is_news)


def _deny(function: str, module: ModuleType) -> None:
    if not callable(getattr(module, function, None)):
        _LOG.info("%s has no %s: more is imported than is used", _MODULE, function)
        return
    setattr(module, function, _is_not)


def _is_not() -> bool:
    return False


def _is_news(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith("PyTorch was not found")

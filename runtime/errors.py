"""The exceptions corun raises for what users, files and machines do wrong.

An assertion means a bug of corun; one of these means that its user can act. Every message says
what was given, which limit it met, and which flag changes that limit.

CorunError
├── ConfigError            an option or configuration file is wrong           (exit code 2)
├── ModelError             the base model cannot be loaded or is refused
├── ResourceError          the machine has too little of something
├── RequestError           one request is wrong                               (HTTP 400)
│   ├── NotServedError     it asks for a feature that corun does not serve    (HTTP 400)
│   ├── ContextLengthError its prompt leaves no room for output               (HTTP 400)
│   ├── UnknownModelError  it names no model or adapter that is served        (HTTP 404)
│   ├── AdapterUnavailableError  its adapter is registered but not ready      (HTTP 503)
│   │   ├── AdapterChangedError  its adapter has changed on the way           (HTTP 503)
│   │   └── AdapterFailedError   its adapter's files are refused              (HTTP 400)
│   ├── AdapterExistsError the name that it would give an adapter is taken    (HTTP 400)
│   ├── InvalidKeyError    it carries no key that fits                        (HTTP 401)
│   ├── AdminKeyNeededError  it carries one that does not fit for this        (HTTP 403)
│   ├── TooManySequencesError  it asks for more than can ever run and wait    (HTTP 400)
│   ├── OverloadedError    too many requests are waiting                      (HTTP 429)
│   └── StepFailedError    the step that computed it failed                   (HTTP 500)
├── AdapterError           an adapter's files or configuration are refused    (HTTP 400)
└── EngineDeadError        the engine process is gone                         (HTTP 503)
"""

from .timing import EngineTiming


def encodable(text: str) -> str:
    """Return ``text`` with lone surrogates escaped, which names in JSON files may hold."""
    return text.encode(errors="backslashreplace").decode()


class CorunError(Exception):
    """Base of all errors that corun raises on purpose.

    ``status`` is what HTTP answers with, ``code`` names the kind of error there.
    """

    status = 500
    code = "internal_error"
    timing: EngineTiming | None = None  # of the request that it ended, if the engine had begun

    def __str__(self) -> str:
        return encodable(super().__str__())

    @property
    def kind(self) -> str:
        """The name of its class, or of the nearest above that this module has."""
        return next(one.__name__ for one in type(self).__mro__ if one.__module__ == __name__)


class ConfigError(CorunError):
    """An option, or a key of a configuration file, is unknown or out of range."""


class ModelError(CorunError):
    """The base model cannot be loaded, or corun refuses to serve it."""


class ResourceError(CorunError):
    """The machine has too little memory, disk or another resource."""


class RequestError(CorunError):
    """One request is invalid; others are not affected.

    ``param`` names the offending field of the request, where there is one.
    """

    status = 400
    code = "invalid_request_error"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class NotServedError(RequestError):
    """The request asks for something that corun does not serve."""

    code = "not_served"


class ContextLengthError(RequestError):
    """The request's prompt is longer than the model's context takes, with room for one token.

    Its code, and "maximum context length" in its message, are what clients look for that send the
    request to a model with a longer context then.
    """

    code = "context_length_exceeded"


class UnknownModelError(RequestError):
    """The request names a model or adapter that is not registered."""

    status = 404
    code = "model_not_found"


class AdapterUnavailableError(RequestError):
    """The request's adapter cannot be used now: it is loading or draining, or a copy failed."""

    status = 503
    code = "adapter_unavailable"


class AdapterChangedError(AdapterUnavailableError):
    """The request's prompt was made for an older version of its adapter."""


class AdapterFailedError(AdapterUnavailableError):
    """The request's adapter cannot be served: asking again changes nothing."""

    status = 400
    code = "adapter_failed"


class AdapterExistsError(RequestError):
    """An adapter of this name is loaded already, with other content."""

    code = "adapter_exists"


class InvalidKeyError(RequestError):
    """The request carries no key, or one that is none."""

    status = 401
    code = "invalid_api_key"


class AdminKeyNeededError(RequestError):
    """The request carries a key that is not enough for what it asks."""

    status = 403
    code = "admin_key_needed"


class TooManySequencesError(RequestError):
    """The request has more prompts and choices than could ever run and wait at once."""

    code = "too_many_sequences"


class OverloadedError(RequestError):
    """The waiting queue is full, or the request has waited for longer than --max-queue-s."""

    status = 429
    code = "overloaded"


class StepFailedError(RequestError):
    """The step that computed this request failed; its other rows go on."""

    status = 500
    code = "step_failed"


class AdapterError(CorunError):
    """An adapter directory is missing, damaged, or uses what corun does not serve."""

    status = 400
    code = "adapter_refused"


class EngineDeadError(CorunError):
    """The engine process died or was shut down."""

    status = 503
    code = "engine_dead"


def rebuild_error(kind: str | None, message: str, *, default: type[CorunError]) -> CorunError:
    """Return the error that another process reported as a class name of this module and a text.

    A kind that this module does not define becomes ``default``, with the kind in the message.
    """
    found = globals().get(kind) if kind is not None else None
    if isinstance(found, type) and issubclass(found, CorunError):
        return found(message)
    return default(message if kind is None else f"{kind}: {message}")

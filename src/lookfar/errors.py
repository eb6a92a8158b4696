"""The errors and warnings that lookfar raises on purpose. Each message is one sentence that says what to do."""


class LookfarError(Exception):
    """The base class of every error that lookfar raises on purpose."""


class ConfigError(LookfarError, ValueError):
    """An option has an unknown name or a value out of its range."""


class RequestError(LookfarError, ValueError):
    """A prompt or a generation argument cannot be used."""


class SamplingError(RequestError, RuntimeError):
    """There is no token to sample: the scores are NaN. (A RuntimeError, as in torch.)"""


class ConstraintError(RequestError):
    """A JSON schema, regular expression or grammar for structured output cannot be used."""


class CapacityError(RequestError):
    """A request does not fit the model's positions or the memory of the KV cache."""


class ModelError(LookfarError):
    """A model cannot be found, read or decoded."""


class FirstPassError(ModelError):
    """What transformers computes for a prompt cannot be continued step by step."""


class DemoError(ModelError):
    """The demo model cannot be downloaded or converted."""


class StoreError(LookfarError):
    """A draft store cannot be read, written or used with this model."""


class RankError(LookfarError):
    """Another rank of a group has ended, does not answer, or has failed."""


class LookfarWarning(UserWarning):
    """Something works, but not in the way that was asked for."""


def first_sentence(error: BaseException) -> str:
    """Return the first sentence of another library's error message."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text.split(". ")[0].rstrip(".:")

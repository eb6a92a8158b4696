"""Everything lookfar raises or warns of on purpose. Each message is one sentence that says what to do."""


class LookfarError(Exception):
    """The base of every error raised by lookfar on purpose."""


class ConfigError(LookfarError, ValueError):
    """An option has an unknown name or a value out of its range."""


class RequestError(LookfarError, ValueError):
    """A prompt or a generation argument cannot be used."""


class CapacityError(RequestError):
    """A request does not fit the model's positions or the memory for its keys and values."""


class ModelError(LookfarError):
    """A model cannot be found, read or decoded."""


class DemoError(ModelError):
    """The demo model cannot be fetched or converted."""


class StoreError(LookfarError):
    """A store cannot be read, written or used with this model."""


class LookfarWarning(UserWarning):
    """Something works, but not as was asked."""


def first_sentence(error: BaseException) -> str:
    """The gist of somebody else's error message."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text.split(". ")[0].rstrip(".:")

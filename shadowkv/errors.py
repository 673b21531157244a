"""Every error that a user can cause. A message says what was given, what is allowed, what to do."""


class ShadowKVError(Exception):
    """Base of all errors raised on purpose by this package."""


class ConfigError(ShadowKVError, ValueError):
    """A setting is out of range or contradicts another one."""


class ShapeError(ShadowKVError, ValueError):
    """A tensor does not have the axes that the operation needs."""


class NumericsError(ShadowKVError, ValueError):
    """A tensor holds NaN or infinity where the computation needs finite numbers."""


class CapacityError(ShadowKVError):
    """Memory or a reserved length does not suffice: says bytes (or tokens) needed and there."""


class UnsupportedModelError(ShadowKVError):
    """The model's architecture, or a variant that its config asks for, is not implemented."""


class CheckpointError(ShadowKVError):
    """The model's files are missing, damaged or do not match its config: names the tensor or file."""


class RequestError(ShadowKVError, ValueError):
    """A request cannot be served as it was given (empty prompt, too long, bad sampling setting)."""

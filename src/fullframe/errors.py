"""The exceptions a user can meet.

FullframeError
├── ArgumentError     a function was called with what it does not take, or without what it needs
├── MeshError         the mesh does not fit the ranks that are there
├── ShapeError        a size, a boundary or an agreement between ranks does not hold
├── DivergenceError   the ranks of a replica do not run the same program any more
├── RankError         another rank has ended, or does not come, while this one waits for it
├── UnsupportedOp     a torch function has no exact rule for the placements it got
├── GradientError     a gradient could not be averaged, or not be given
├── StrategyError     a strategy's field is unknown, out of range, or contradicts another
├── RecipeError       a recipe file cannot be read or lacks what it must give
├── DataError         a data set's file is missing, or is not as its format says
├── DeviceError       a device cannot be used, has no such name, or its stored rates cannot be read
├── LintError         what `doctor lint` is told to read is not there, or its settings are wrong
├── RunError          a run directory cannot be used as asked
├── LaunchError       a job cannot be described, submitted or asked for on its cluster
└── CheckpointError   a checkpoint is missing, unreadable or of another model
"""


class FullframeError(Exception):
    """Anything fullframe refuses to do; the message says what, with values, and the remedy."""


class ArgumentError(FullframeError, TypeError, ValueError):
    """A function was called with what it does not take, or without what it needs."""


class MeshError(FullframeError, ValueError):
    """The mesh does not fit the ranks that are there."""


class ShapeError(FullframeError, ValueError):
    """A size, a boundary or an agreement between ranks does not hold."""


class DivergenceError(FullframeError, RuntimeError):
    """The ranks of a replica do not run the same program any more, so what they send each other fits nowhere.

    Raised on all ranks of the replica that wait for each other or send, for as long as the mesh is used.
    `consequence`: another rank's error is the cause, and that rank raises it.
    """

    def __init__(self, message: str, consequence: bool = False):
        self.consequence = consequence
        super().__init__(message)


class RankError(FullframeError, RuntimeError):
    """Another rank has ended, or does not come, while this one waits for it; that rank's own error is the cause."""


class UnsupportedOp(FullframeError, NotImplementedError):
    """A torch function has no exact rule for what it got; raised on every rank of a replica alike.

    `function` names the torch function, `placements` the split operands it got, `module` the path of the module
    whose forward was running ("" outside a module), `reason` why there is no rule, `fix` the remedy.
    """

    def __init__(self, function: str, placements: tuple[str, ...], module: str, reason: str, fix: str):
        self.function, self.placements, self.module, self.reason, self.fix = function, placements, module, reason, fix
        where = f" in module '{module}'" if module else ""
        operands = "; ".join(placements) or "no split operand"
        super().__init__(f"{function}{where}: {reason}. Split operands: {operands}. {fix}")


class GradientError(FullframeError, RuntimeError):
    """A gradient could not be averaged over the ranks, or one is asked for that cannot be given."""


class StrategyError(FullframeError, ValueError):
    """A strategy's field is unknown, out of range, or contradicts another."""


class RecipeError(FullframeError):
    """A recipe file cannot be read or lacks what it must give."""


class DataError(FullframeError):
    """A data set's file is missing, or is not as its format says."""


class DeviceError(FullframeError, ValueError):
    """A device cannot be used, has no such name, or its stored rates cannot be read."""


class LintError(FullframeError, ValueError):
    """What `doctor lint` is told to read is not there, or its settings are wrong."""


class RunError(FullframeError):
    """A run directory cannot be used as asked."""


class LaunchError(FullframeError):
    """A job cannot be described, submitted or asked for on its cluster."""


class CheckpointError(FullframeError):
    """A checkpoint is missing, unreadable or of another model."""


def require_count(error: type[Exception], name: str, value: object, least: int = 1) -> None:
    """Raise `error` unless `value` is a whole number of at least `least`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise error(f"{name} must be a whole number >= {least}, got {value!r}")

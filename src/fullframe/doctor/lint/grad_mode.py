"""Whether autograd is on inside a context manager or decorator."""

from fullframe.doctor.lint.values import Origin, Value

_NO_GRAD = frozenset(
    f"torch.{module}{name}"
    for module in ("", "autograd.", "autograd.grad_mode.")
    for name in ("no_grad", "inference_mode")
)
SETS_GRAD = frozenset({"torch.set_grad_enabled", "torch.autograd.set_grad_enabled"})
_GRAD = frozenset({"torch.enable_grad", "torch.autograd.enable_grad"})
_KEEPS_GRAD = ("torch.", "builtins.", "contextlib.", "functools.", "warnings.", "time.", "tempfile.", "typing.",
               "dataclasses.", "abc.", "tqdm.", "rich.", "apex.", "pytest.")  # fmt: skip


def grad_within(context: Value, grad: bool | None) -> bool | None:
    """Whether autograd is on inside `with context`, where it is `grad` outside; None: unknown."""
    found = {_grad_of(member, grad) for member in context.members()}
    return found.pop() if len(found) == 1 else None


def _grad_of(context: Value, grad: bool | None) -> bool | None:
    path = context.path
    if path in _NO_GRAD:
        mode = context.argument(0, "mode") if context.origin is Origin.CALL else None
        return grad if mode is not None and mode.constant is False else False
    if path in _GRAD:
        return True
    if path in SETS_GRAD:
        given = context.argument(0, "mode")
        return given.constant if given is not None and isinstance(given.constant, bool) else None
    # `no_sync`, `accumulate` and a lock leave it as it is; of what else is unknown nothing is known.
    return grad if path.startswith(_KEEPS_GRAD) or context.method in ("no_sync", "accumulate", "autocast") else None

"""Which of the user's modules is running."""

import sys
from types import FrameType

from torch import nn


def module_path(frame: FrameType | None = None) -> str:
    """Path and class of the user's module whose forward is running, from the stack; "" outside a module.

    `frame` is the innermost line of another thread's stack, this thread's unless given.
    """
    modules: list[nn.Module] = []
    frame = frame or sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if frame.f_code.co_name in ("forward", "_call_impl") and isinstance(owner, nn.Module):
            modules.append(owner)
        frame = frame.f_back
    users = [m for m in modules if not type(m).__module__.startswith(("fullframe.", "torch.nn.parallel"))]
    if not users:
        return ""
    innermost, root = users[0], users[-1]
    name = next((name for name, module in root.named_modules() if module is innermost), "")
    return f"{name} ({type(innermost).__name__})" if name else type(innermost).__name__

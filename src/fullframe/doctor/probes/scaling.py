"""What a program does with a GradScaler, and when it clips."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from fullframe.simulation.fake.replaced import replaced

_CLIPS = ("clip_grad_norm_", "clip_grad_value_")


class ScalerProbe:
    """Tells `said(action, scale, optimizer)` of scale, unscale, clip, step and update, in order.

    `stepping` is true while a scaler takes an optimizer's step.
    """

    def __init__(self, said: Callable[[str, float, Any], None]):
        self._said = said
        self.stepping = False

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Inside, torch's GradScaler and its functions that clip tell of themselves."""
        scaler = torch.amp.GradScaler
        with ExitStack() as stack:
            for name in ("scale", "unscale_", "step", "update"):
                stack.enter_context(replaced(scaler, name, self._told(getattr(scaler, name), name.strip("_"))))
            for name in _CLIPS:
                clip = self._clipping(getattr(nn.utils, name))
                for owner in (nn.utils, nn.utils.clip_grad):
                    stack.enter_context(replaced(owner, name, clip))
            yield

    def _told(self, original: Callable[..., Any], action: str) -> Callable[..., Any]:
        def told(scaler: Any, *args: Any, **kwargs: Any) -> Any:
            if not scaler.is_enabled():
                return original(scaler, *args, **kwargs)
            if not self.stepping:
                optimizer = args[0] if action in ("unscale", "step") and args else None
                self._said(action, float(scaler.get_scale()), optimizer)
            if action != "step":
                return original(scaler, *args, **kwargs)
            self.stepping = True
            try:
                return original(scaler, *args, **kwargs)
            finally:
                self.stepping = False

        return told

    def _clipping(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def clip(*args: Any, **kwargs: Any) -> Any:
            self._said("clip", 0.0, None)
            return original(*args, **kwargs)

        return clip

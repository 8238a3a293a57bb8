"""One real step under the storage tracker of the simulation: what a rank's tensors held, of what kind, made where."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_iter

from fullframe.simulation.memory.account import Account, account
from fullframe.simulation.memory.scratch import cpu_scratch
from fullframe.simulation.memory.trace import Trace, Tracer
from fullframe.spatial.tensor import SpatialTensor
from fullframe.training.observers import Observed


class TracedStep:
    """Between `start(batch)` and `stop()` every op is followed; on the CPU with what its kernel takes for itself.

    What goes wrong in following ends the trace, never the step.
    """

    def __init__(self, run: Observed):
        model, device = run.session.state.model, next(run.session.state.model.parameters()).device
        names = {module: name for name, module in model.named_modules()}
        scratch = cpu_scratch if device.type == "cpu" else _nothing
        self._tracer = CarefulTracer(names, scratch)
        self._run = run
        self._hooks: list[Any] = []

    def start(self, batch: Any) -> bool:
        """What is there already is taken in; then the step is followed. Whether it can be."""
        tracer = self._tracer
        tracer.begin()
        try:
            self._take_in(batch)
        except Exception:  # a tensor of some kind that has no storage to look at
            tracer.finish()
            return False
        tracer.outside = "forward"
        return True

    def _take_in(self, batch: Any) -> None:
        tracer, session = self._tracer, self._run.session
        model, state = session.state.model, session.state
        tracer.mark("parameter", list(model.parameters()), list(model.buffers()), list(session.model.parameters()))
        tracer.mark("gradient", [p.grad for p in session.model.parameters()])  # DDP's buckets
        tracer.mark("optimizer", list(state.optimizer.state.values()))
        tracer.mark("batch", [t.local if isinstance(t, SpatialTensor) else t for t in tree_iter(batch)])
        if state.average is not None:
            tracer.mark("average", list(state.average.state_dict().values()))
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(lambda p: tracer.mark("gradient", p.grad))
            for parameter in session.model.parameters()
            if parameter.requires_grad
        ]

    def stop(self) -> tuple[Trace, Account] | None:
        """The step's trace and its account; None where it could not be followed."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._tracer.finish()
        if self._tracer.problem:
            return None
        return self._tracer.trace, account(self._tracer.trace)


class CarefulTracer(Tracer):
    """A `Tracer` of real ops: what it fails at itself is noted in `problem`, and it follows no more."""

    def __init__(self, names: Any, scratch: Callable[[Any, tuple[Any, ...], Any], int]):
        super().__init__(names, {}, self._take, scratch)
        self.problem = ""
        self._out: Any = None
        self._ran = False

    def begin(self) -> None:
        """As `with`."""
        self.__enter__()

    def finish(self) -> None:
        """As the end of `with`."""
        self.end_step()
        self.__exit__(None, None, None)

    def _take(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        self._ran = False
        out = func(*args, **kwargs)
        self._out, self._ran = out, True
        return out

    def mark(self, category: str, *trees: Any, stream: str = "") -> None:
        """As `Tracer.mark`; tensors without a storage are left out."""
        kept = [one for one in tree_iter(trees) if isinstance(one, Tensor) and _has_storage(one)]
        super().mark(category, kept, stream=stream)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.problem:
            return func(*args, **(kwargs or {}))
        try:
            return super().__torch_dispatch__(func, types, args, kwargs)
        except Exception as error:
            if not self._ran:
                raise  # the op's own
            self.problem = f"{func}: {type(error).__name__}: {error}"
            return self._out
        finally:
            self._out, self._ran = None, False


def _nothing(func: Any, args: tuple[Any, ...], out: Any) -> int:
    return 0


def _has_storage(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and tensor.device.type != "meta"

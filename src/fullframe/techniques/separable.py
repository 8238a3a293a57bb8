"""Whether an optimizer updates each parameter by itself, so that it may be given some of them at a time."""

import copy
import math
from collections import OrderedDict, defaultdict
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fullframe.errors import StrategyError
from fullframe.model.trained import overlapping
from fullframe.ranks.randomness import kept_random_state, seed_everything

_KNOWN = ("torch", "torchao", "bitsandbytes")  # packages of which every optimizer does
_STEPS = 12  # the first few of some update nothing, and an estimate over all parameters enters the next one
# Of the largest update. A weight decay by a mean over all parameters is a ten-thousandth of it, which rounding may be,
# too, in single precision.
_RTOL = {torch.float64: 1e-6, torch.float32: 1e-3}
_OWN = ("state", "param_groups", "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


def require_separable(optimizer: Optimizer, technique: str) -> None:
    """Raises StrategyError where the update of a parameter depends on another one's gradient, or is that one's too.

    So it is with Prodigy, D-Adaptation, and norms over all parameters. An optimizer that is not torch's is tried on
    three small parameters of its own, in a copy; nothing of it changes, nor does a random state.
    """
    groups = enumerate(group["params"] for group in optimizer.param_groups)
    if shared := overlapping((f"parameter {n} of group {g}", p) for g, group in groups for n, p in enumerate(group)):
        raise StrategyError(
            f"{shared} (one was given the other's .data, perhaps), so that a step updates it twice; make them one "
            f"parameter (one.weight = other.weight), or leave out {technique}"
        )
    if type(optimizer).__module__.partition(".")[0] in _KNOWN:
        return
    name = type(optimizer).__name__
    remedy = (
        f"leave out {technique}, which gives it some of the parameters at a time, or use an optimizer of torch.optim"
    )
    try:
        alone, beside = _tried(optimizer)
    except Exception as error:
        raise StrategyError(
            f"whether {name} updates each parameter by itself cannot be told, as on three small ones it raised "
            f"{type(error).__name__}: {error}; {remedy}"
        ) from error
    if not alone.update.any():
        raise StrategyError(
            f"whether {name} updates each parameter by itself cannot be told, as a copy of it updates none (does it "
            f"hold another optimizer?); {remedy}"
        )
    if not alone.is_like(beside):
        raise StrategyError(f"{name} updates a parameter by the gradients of others too; {remedy}")


class _Made(NamedTuple):
    """By an optimizer: the update of a parameter, and the numbers among the options of its group, as Prodigy's `d`."""

    update: Tensor
    numbers: dict[str, float]

    def is_like(self, other: "_Made") -> bool:
        rtol = _RTOL[self.update.dtype]
        most = rtol * float(self.update.abs().nan_to_num().max())
        return torch.allclose(self.update, other.update, rtol=0.0, atol=most, equal_nan=True) and all(
            math.isclose(number, other.numbers.get(name, math.inf), rel_tol=rtol) or math.isnan(number)
            for name, number in self.numbers.items()
        )


def _tried(optimizer: Optimizer) -> tuple[_Made, _Made]:
    """What it makes of a parameter alone and beside others; in single precision where it takes no other."""
    try:
        return _made(optimizer, False, torch.float64), _made(optimizer, True, torch.float64)
    except Exception:
        return _made(optimizer, False, torch.float32), _made(optimizer, True, torch.float32)


def _made(optimizer: Optimizer, others: bool, dtype: torch.dtype) -> _Made:
    """What some steps of a copy of it make of a parameter, while `others` around it have gradients, or have none."""
    real = [p for group in optimizer.param_groups for p in group["params"]]
    probe: Any = object.__new__(type(optimizer))
    shared = {id(p): p for p in real}  # is not copied, wherever the optimizer refers to it
    kept = {name: value for name, value in vars(optimizer).items() if name not in _OWN}
    vars(probe).update(copy.deepcopy(kept, shared))
    generator = torch.Generator().manual_seed(0)
    start, slope, *noise = (
        torch.randn(8, 6, dtype=dtype, generator=generator).to(real[0].device) for _ in range(2 + _STEPS)
    )
    before, one, after = (nn.Parameter(start.clone()) for _ in range(3))
    options = {name: value for name, value in optimizer.param_groups[0].items() if name != "params"}
    options["lr"] = options.get("lr") or 1e-3  # a warm-up may begin with 0
    probe.param_groups = [{**copy.deepcopy(options, shared), "params": [before, one, after]}]
    probe.state = defaultdict(dict)
    probe._optimizer_step_pre_hooks, probe._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    with kept_random_state():
        seed_everything(0)
        for step in range(_STEPS):
            one.grad = slope + 0.1 * noise[step]  # much the same each time, as how far it is to go is told by that
            for other in (before, after) if others else ():
                other.grad = 10 ** (1 + step % 3) * one.grad.flip(0)
            probe.step()
    options = probe.param_groups[0]
    values = {n: v.item() if isinstance(v, Tensor) and v.numel() == 1 else v for n, v in options.items()}
    numbers = {name: float(value) for name, value in values.items() if isinstance(value, (int, float))}
    return _Made(one.detach() - start, numbers)

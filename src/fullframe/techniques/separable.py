"""Whether an optimizer updates each parameter by itself, so that it may be given some of them at a time."""

import copy
from collections import OrderedDict, defaultdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fullframe.errors import StrategyError
from fullframe.model.trained import overlapping
from fullframe.ranks.randomness import kept_random_state, seed_everything

_KNOWN = ("torch", "torchao", "bitsandbytes")  # packages of which every optimizer does
_STEPS = 4  # an estimate over all parameters may enter the update after the one that it was made in
_RTOL = 1e-3  # of the update; what is estimated over all of them differs by far more
_OWN = ("state", "param_groups", "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


def require_separable(optimizer: Optimizer, technique: str) -> None:
    """Raises StrategyError where the update of a parameter depends on another one's gradient, or is that one's too.

    So it is with Prodigy, D-Adaptation, and norms over all parameters. An optimizer that is not torch's is tried on two
    small parameters of its own, in a copy; nothing of it changes, nor does a random state.
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
        alone, beside = _updates(optimizer, others=False), _updates(optimizer, others=True)
    except Exception as error:
        raise StrategyError(
            f"whether {name} updates each parameter by itself cannot be told, as on two small ones it raised "
            f"{type(error).__name__}: {error}; {remedy}"
        ) from error
    if not alone.any():
        raise StrategyError(
            f"whether {name} updates each parameter by itself cannot be told, as a copy of it updates none (does it "
            f"hold another optimizer?); {remedy}"
        )
    if not torch.allclose(alone, beside, rtol=_RTOL, atol=0.0, equal_nan=True):
        raise StrategyError(f"{name} updates a parameter by the gradients of others too; {remedy}")


def _updates(optimizer: Optimizer, others: bool) -> Tensor:
    """What some steps of a copy of it make of one parameter, while `others` have gradients, or have none."""
    real = [p for group in optimizer.param_groups for p in group["params"]]
    probe: Any = object.__new__(type(optimizer))
    shared = {id(p): p for p in real}  # is not copied, wherever the optimizer refers to it
    kept = {name: value for name, value in vars(optimizer).items() if name not in _OWN}
    vars(probe).update(copy.deepcopy(kept, shared))
    generator = torch.Generator().manual_seed(0)
    start, *gradients = (torch.randn(8, 6, generator=generator).to(real[0]) for _ in range(1 + 2 * _STEPS))
    one, other = nn.Parameter(start * 1e-2), nn.Parameter(start * 1e-2)
    options = {name: value for name, value in optimizer.param_groups[0].items() if name != "params"}
    options["lr"] = options.get("lr") or 1e-3  # a warm-up may begin with 0
    probe.param_groups = [{**copy.deepcopy(options, shared), "params": [one, other]}]
    probe.state = defaultdict(dict)
    probe._optimizer_step_pre_hooks, probe._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    with kept_random_state():
        seed_everything(0)
        for step in range(_STEPS):
            one.grad, other.grad = gradients[step].clone(), gradients[_STEPS + step] * 100 if others else None
            probe.step()
    return one.detach() - start * 1e-2

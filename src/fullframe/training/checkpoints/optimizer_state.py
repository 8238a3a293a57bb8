"""An optimizer's state by parameter name: tensors, shards and single numbers; its groups' options as plain facts.

The optimizer may hold the state of all parameters, of some (ZeRO-1), or a shard of each (FSDP2), on each rank.
"""

import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fullframe.errors import CheckpointError
from fullframe.model.sharding.values import is_sharded, local_value
from fullframe.ranks.agreement import from_all_ranks
from fullframe.training.checkpoints.manifest import Manifest
from fullframe.training.checkpoints.safetensors_files import DTYPES

PREFIX = "optimizer/"
REMEDY = "resume with the recipe that wrote it, or take its weights by `fullframe export`"
# The last four choose among implementations, which may differ between devices.
_NOT_STORED = ("params", "param_names", "fused", "foreach", "capturable", "differentiable")
_NUMBERS = {bool: torch.bool, int: torch.int64, float: torch.float64}


class _Entry(NamedTuple):
    name: str
    held: Any  # the parameter's state, or a dict or list inside it
    key: Any
    value: Any


class OptimizerState:
    """The state that `optimizer` keeps for the parameters of `model`; all ranks make it, before the first step.

    Tensors that hold less than they stand for (8-bit codes and scales) are stored as the numbers they stand for, which
    any sharding can take up, and as they are, so that the same sharding goes on bit for bit.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer):
        self._model, self._optimizer = model, optimizer
        self._said = False
        self._begun: dict[Any, set[str]] = {}  # what was held for a parameter when there first was something
        self._made = [_options(group) for group in optimizer.param_groups]  # as the recipe has it
        names = self._names()
        mine = [[names.get(p, "") for p in group["params"] if p.requires_grad] for group in optimizer.param_groups]
        everyones = from_all_ranks(mine)
        self._groups = [sorted(set().union(*parts)) for parts in zip(*everyones, strict=True)]

    def tensors(self) -> dict[str, Tensor]:
        """The state by name, numbers as tensors without dims; raises CheckpointError when one cannot be stored."""
        tensors = {}
        for entry in self._entries():
            tensors[entry.name] = as_tensor(entry.value, entry.name)
            tensors |= _parts(entry)
        return tensors

    def facts(self) -> dict[str, Any]:
        """The kind of optimizer, and of each group the parameters' names and the options, as made and as they are."""
        if any("" in names for names in self._groups):
            raise CheckpointError(
                "the optimizer updates a parameter that is not the model's, which a checkpoint would lose; "
                "make it a parameter of the recipe's model"
            )
        groups = zip(self._groups, self._optimizer.param_groups, self._made, strict=True)
        lacks = self._lacking()
        if lacks and not self._said:
            self._said = True
            warnings.warn(f"a checkpoint cannot be resumed, for it lacks {lacks}", stacklevel=2)
        return {
            "kind": type(self._optimizer).__name__,
            "lacks": lacks,
            "groups": [{"parameters": names, "options": _options(g), "made": made} for names, g, made in groups],
        }

    def targets(self, manifest: Manifest) -> dict[str, Tensor]:
        """The tensors to be filled from a checkpoint; raises CheckpointError when it is of another optimizer.

        State that the checkpoint lacks, of a parameter that had no gradient yet, is not there afterwards either.
        """
        self._check_groups(manifest.facts["optimizer"])
        if lacks := manifest.facts["optimizer"].get("lacks"):
            raise CheckpointError(
                f"the checkpoint lacks {lacks}; begin anew, from the weights that `fullframe export` writes"
            )
        stored = {name for name in manifest.tensors if name.startswith(PREFIX)}
        if stored:
            self._make_state()
        for parameter, name in self._names().items():
            if stored.isdisjoint(entry.name for entry in _entries(name, self._optimizer.state.get(parameter, {}))):
                self._optimizer.state.pop(parameter, None)
        targets: dict[str, Tensor] = {}
        for entry in self._entries():
            parts = _parts(entry)
            if parts and all(name in manifest.tensors for name in parts):
                targets |= parts
            else:
                targets[entry.name] = _whole(as_tensor(entry.value, entry.name))
        return targets

    def require_place(self, manifest: Manifest) -> None:
        """Raises CheckpointError on all ranks when state in the checkpoint is no rank's, after `targets`."""
        placed: set[str] = set().union(*from_all_ranks({entry.name for entry in self._entries()}))
        dropped = tuple(f"/{name}" for name in _parameters(manifest) - set().union(*self._groups))
        lost = sorted(
            name
            for name in manifest.tensors
            if name.startswith(PREFIX) and name not in placed and not name.endswith(dropped)
        )
        if lost:
            raise CheckpointError(f"the checkpoint's {some(lost)} not of this run's optimizer; {REMEDY}")

    def go_on(self, manifest: Manifest, filled: Mapping[str, Tensor]) -> list[str]:
        """Take up the numbers, packed tensors and options of a checkpoint; returns what the user should know."""
        for entry in self._entries():
            if not isinstance(entry.value, Tensor):
                entry.held[entry.key] = type(entry.value)(filled[entry.name].item())
            elif entry.name in filled and (packed := _packed(entry.value)) is not None:
                packed.copy_(local_value(filled[entry.name]))
        facts = manifest.facts["optimizer"]["groups"]
        said = []
        for group, stored, made in zip(self._optimizer.param_groups, facts, self._made, strict=True):
            for option, value in stored["options"].items():
                _set_option(group, option, value)
            said += [
                f"the recipe's {option} is now {made[option]}; the optimizer goes on with {was}"
                for option, was in stored["made"].items()
                if option in made and made[option] != was
            ]
            made.update({option: was for option, was in stored["made"].items() if option in made})  # what it began with
        before, now = _parameters(manifest), set().union(*self._groups)
        if now - before:
            said.append(f"{some(sorted(now - before))} trained from now on")
        if before - now:
            said.append(f"{some(sorted(before - now))} no longer trained")
        return said

    def _lacking(self) -> str:
        """What the optimizer's own `state_dict` or groups hold beside the state of parameters and plain options."""
        whole, kind = self._optimizer.state_dict(), type(self._optimizer).__name__
        states = whole.get("state", {})
        held = [self._optimizer.state.get(p, {}) for group in self._optimizer.param_groups for p in group["params"]]
        if beside := sorted(str(key) for key in whole.keys() - {"state", "param_groups"}):
            return f"what the state_dict of {kind} has beside state and groups ({', '.join(beside)})"
        if any(not isinstance(key, int) for key in states) or sum(map(len, states.values())) > sum(map(len, held)):
            return f"state of {kind} that is no parameter's in its `state`: of another optimizer that it holds, perhaps"
        for group in self._optimizer.param_groups:
            for name in group.keys() - _options(group).keys() - {"params"}:
                if any(isinstance(leaf, (Tensor, np.ndarray)) for leaf in tree_leaves(group[name])):
                    return f"the option {name} of {kind}, which is an array or holds some"
        for parameter, name in self._names().items():
            now = {entry.name for entry in _entries(name, self._optimizer.state.get(parameter, {}))}
            if late := now and now - self._begun.setdefault(parameter, now):
                return f"what makes {min(late)}, which {kind} has begun after its first step"
        return ""

    def _make_state(self) -> None:
        """Have the optimizer make the state of parameters that have none yet, by a step with gradients of zero.

        All ranks take the step, also one that has nothing to make: ranks may exchange parameters in it.
        """
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None if self._optimizer.state.get(parameter) else torch.zeros_like(parameter)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    def _entries(self) -> Iterator[_Entry]:
        for parameter, name in self._names().items():
            yield from _entries(name, self._optimizer.state.get(parameter, {}))

    def _names(self) -> dict[Any, str]:
        return {parameter: name for name, parameter in self._model.named_parameters()}

    def _check_groups(self, facts: Mapping[str, Any]) -> None:
        kind = type(self._optimizer).__name__
        if facts["kind"] != kind:
            raise CheckpointError(f"the checkpoint's optimizer is {facts['kind']}, this run's is {kind}; {REMEDY}")
        there = {name: number for number, group in enumerate(facts["groups"]) for name in group["parameters"]}
        here = {name: number for number, group in enumerate(self._groups) for name in group}
        moved = sorted(name for name in there.keys() & here.keys() if there[name] != here[name])
        if moved or len(facts["groups"]) != len(self._groups):
            raise CheckpointError(
                f"the optimizer has {len(self._groups)} groups of parameters, the checkpoint's {len(facts['groups'])}"
                + (f", and {some(moved)} in another one" if moved else "")
                + f"; {REMEDY}"
            )


def as_tensor(value: Any, name: str) -> Tensor:
    """`value` as the tensor that a checkpoint keeps for it; raises CheckpointError where it can keep none."""
    if type(value) in _NUMBERS:
        return torch.tensor(value, dtype=_NUMBERS[type(value)])
    if not isinstance(value, Tensor):
        raise CheckpointError(f"{name} is of type {type(value).__name__}, which a checkpoint cannot hold")
    if value.dtype not in DTYPES or value.layout != torch.strided:
        raise CheckpointError(
            f"{name} is {value.dtype}, {value.layout}, which a checkpoint cannot hold; give it a dense layout and a "
            "dtype that safetensors has, as torch.float64 or torch.complex64, or make it a buffer with persistent=False"
        )
    if is_sharded(value) and any(placement.is_partial() for placement in value.placements):
        raise CheckpointError(f"{name} is a sum that the ranks have not added up yet ({value.placements})")
    return value.detach()


def some(names: Sequence[str]) -> str:
    """The names with their verb: 'a is', or 'a, b, c, ... (7) are'."""
    shown = ", ".join(names[:3]) + (f", ... ({len(names)})" if len(names) > 3 else "")
    return f"{shown} {'is' if len(names) == 1 else 'are'}"


def is_plain(value: Any) -> bool:
    """Whether a value survives JSON unchanged, or as a list where it is a tuple."""
    try:
        back = json.loads(json.dumps(value))
    except (TypeError, ValueError):
        return False
    return bool(back == (list(value) if isinstance(value, tuple) else value))


def _parameters(manifest: Manifest) -> set[str]:
    return {name for group in manifest.facts["optimizer"]["groups"] for name in group["parameters"]}


def _entries(parameter: str, held: Any, inside: str = "") -> Iterator[_Entry]:
    """What is held for a parameter, also in dicts and lists of tensors: `key.0` is the first of a list."""
    for key, value in list(held.items() if isinstance(held, dict) else enumerate(held)):
        name = f"{inside}{key}"
        if isinstance(value, (dict, list)) and all(
            leaf is None or isinstance(leaf, Tensor) for leaf in tree_leaves(value)
        ):
            yield from _entries(parameter, value, f"{name}.")
        elif value is not None:
            yield _Entry(f"{PREFIX}{name}/{parameter}", held, key, value)


def _packed(value: Tensor) -> Tensor | None:
    """This rank's part of `value`, when it holds other tensors than the one it stands for."""
    local = local_value(value)
    return local if hasattr(local, "__tensor_flatten__") else None


def _parts(entry: _Entry) -> dict[str, Tensor]:
    """The tensors that a packed value holds, named by the box it stands for; {} for an ordinary value."""
    if not isinstance(entry.value, Tensor) or (packed := _packed(entry.value)) is None:
        return {}
    offsets: Sequence[int] = [0] * packed.dim()
    if is_sharded(entry.value):
        offsets = entry.value.__create_chunk_list__()[0].offsets
    box = ",".join(f"{start}:{start + size}" for start, size in zip(offsets, packed.shape, strict=True))
    attributes = packed.__tensor_flatten__()[0]  # type: ignore[attr-defined]
    return {f"packed/{attribute}[{box}]/{entry.name}": getattr(packed, attribute) for attribute in attributes}


def _whole(value: Tensor) -> Tensor:
    """`value`, or for a packed one an empty ordinary tensor of the same sharding."""
    if _packed(value) is None:
        return value
    if not is_sharded(value):
        return torch.empty(value.shape, dtype=value.dtype, device=value.device)
    local = torch.empty(value.to_local().shape, dtype=value.dtype, device=value.device)
    return type(value).from_local(
        local, value.device_mesh, value.placements, run_check=False, shape=value.shape, stride=value.stride()
    )


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    """The options that are numbers, strings or sequences of them; others stay as the recipe makes them."""
    options = {
        n: value.item() if _is_number(value) or isinstance(value, np.generic) else value for n, value in group.items()
    }
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in options.items()
        if name not in _NOT_STORED and is_plain(value)
    }


def _set_option(group: dict[str, Any], name: str, value: Any) -> None:
    now: Any = group.get(name)
    if _is_number(now):
        now.fill_(value)
    else:
        group[name] = tuple(value) if isinstance(now, tuple) else value


def _is_number(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() == 1

"""What a model must be before its parameters are sharded, or before they are not."""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fullframe.errors import GradientError, MeshError
from fullframe.model.sharding.values import is_sharded
from fullframe.model.trained import overlapping, sparse_tables
from fullframe.spatial.gradients import is_managed
from fullframe.wording import inside


def require_whole(model: nn.Module) -> None:
    """Raises MeshError when a parameter is sharded already."""
    for name, parameter in model.named_parameters():
        if is_sharded(parameter):
            raise MeshError(
                f"parameter {name} is sharded already, by fully_shard perhaps; "
                "pass parallelize(..., shard_parameters=True), which shards the rest and averages all"
            )


class Noted(NamedTuple):
    """A hook of a sharded parameter, for `full_tensor()` in the loop: by it alone a gradient comes that calls hooks."""

    name: str
    got: set[str]

    def __call__(self, gradient: Tensor) -> None:
        self.got.add(self.name)


def require_no_hooks(model: nn.Module) -> None:
    """A sharded parameter's gradient comes by another way, on which no hook is called."""
    for name, parameter in model.named_parameters():
        users = [hook for hook in (parameter._backward_hooks or {}).values() if not isinstance(hook, Noted)]
        if users and not is_managed(parameter):  # as those are that are still gathered
            raise GradientError(
                f"parameter {name} has a gradient hook, which sharded parameters do not call; use "
                "register_post_accumulate_grad_hook after parallelize, or do without shard_parameters"
            )


def require_own_memory(model: nn.Module) -> None:
    """Of what shares memory with a parameter, sharding would make another value that stays as it is."""
    if shared := overlapping((*model.named_buffers(), *model.named_parameters())):
        raise MeshError(
            f"{shared} (one was given the other's .data, perhaps), and sharded parameters have their own; make them "
            "one parameter (one.weight = other.weight), or do without shard_parameters"
        )


def require_no_script(model: nn.Module) -> None:
    """TorchScript reads its parameters past what gathers them."""
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise MeshError(
                f"module {name or 'the model'!r} was compiled by TorchScript, which sharded parameters do not reach; "
                "give parallelize the module that torch.jit was given, or do without shard_parameters"
            )


def require_called(model: nn.Module) -> None:
    """What is never called has no moment at which its parameters could be gathered."""
    if isinstance(model, nn.ModuleList | nn.ModuleDict) and type(model).forward is nn.Module.forward:
        raise MeshError(
            f"the model is an nn.{type(model).__name__} and has no forward, around which sharded parameters are "
            "gathered; put it into an nn.Module whose forward, or another method, calls what is in it, give each of "
            "these to parallelize, or do without shard_parameters"
        )


def require_all_ranks(model: nn.Module) -> None:
    """What the user sharded must be averaged over all ranks too."""
    ranks = dist.get_world_size()
    sharded: dict[str, Any] = {name: p for name, p in model.named_parameters() if is_sharded(p)}
    for name, parameter in sharded.items():
        if parameter.device_mesh.size() != ranks:
            raise MeshError(
                f"parameter {name} is sharded over {parameter.device_mesh.size()} of {ranks} ranks and "
                "would be averaged over those only; give fully_shard a mesh of all ranks"
            )


def require_dense(name: str, module: nn.Module) -> None:
    """Raises MeshError where a module of that name gives sparse gradients."""
    for own, table in sparse_tables(module).items():
        if not is_sharded(table.weight):
            raise MeshError(
                f"{type(table).__name__} {inside(name, own)!r} gives sparse gradients, which torch's FSDP does not "
                "average; build it with sparse=False, or do without shard_parameters"
            )

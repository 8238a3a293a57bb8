"""The user's model on a mesh: parameters averaged by DDP over all ranks, split tensors in and out.

DDP looks for plain tensors and their graphs, which shells do not have, so shells are taken off at its door.
"""

import inspect
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from fullframe.errors import GradientError, MeshError
from fullframe.spatial.mesh import Spatial, spatial_of
from fullframe.spatial.rules import catalog as _rules  # noqa: F401  a split tensor is of no use without its rules
from fullframe.spatial.tensor import Layout, SpatialTensor, layout_of, local_of, wrap

_SYNC_BUFFERS = "forward_sync_buffers"  # in each forward; torch before 2.13 calls it broadcast_buffers
if _SYNC_BUFFERS not in inspect.signature(DistributedDataParallel).parameters:
    _SYNC_BUFFERS = "broadcast_buffers"


def parallelize(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    unsupported: Literal["error", "gather"] = "error",
    find_unused_parameters: bool = False,
) -> "ParallelModel":
    """`model`, unchanged, for split tensors on `mesh`, with gradients averaged over data x height x width.

    Parameters and buffers are taken from the job's first rank, random states from the first rank of each replica.
    An op without an exact rule raises `UnsupportedOp`, or with `unsupported="gather"` runs whole on every rank and
    says so once. `find_unused_parameters` is DDP's.
    """
    if unsupported not in ("error", "gather"):
        raise ValueError(f"unsupported must be 'error' or 'gather', got {unsupported!r}")
    if isinstance(model, (ParallelModel, DistributedDataParallel)):
        raise MeshError(f"the model is wrapped already ({type(model).__name__}); pass the plain model")
    return ParallelModel(model, spatial_of(mesh), unsupported == "gather", find_unused_parameters)


class ParallelModel(nn.Module):
    """What `parallelize` returns; the user's model is `.module`, as in DDP."""

    def __init__(self, model: nn.Module, spatial: Spatial, gather: bool, find_unused_parameters: bool):
        super().__init__()
        self.module = model
        _share_random_state(spatial)
        run: nn.Module = _Undressed(model, gather)
        if dist.get_world_size() > 1:
            for tensor in (*model.parameters(), *model.buffers()):
                dist.broadcast(tensor.detach(), 0)
            if any(p.requires_grad for p in model.parameters()):
                several = (
                    dist.get_world_size() > spatial.size
                )  # within one replica the buffers stay equal by themselves
                run = DistributedDataParallel(
                    run,
                    find_unused_parameters=find_unused_parameters,
                    gradient_as_bucket_view=True,  # a gradient lies in its bucket, not beside it
                    **{_SYNC_BUFFERS: several},  # type: ignore[arg-type]
                )
        # Hidden from nn.Module, so that parameters are named module.xxx and once.
        self.__dict__["_run"] = run

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own forward; split tensors anywhere in nested arguments and results."""
        leaves, spec = _take_off((args, kwargs))
        results, spec = self.__dict__["_run"](leaves, spec)
        run = self.__dict__["_run"]
        if isinstance(run, DistributedDataParallel) and not run.find_unused_parameters:
            self._check_after_backward(results, run)
        return _put_on(results, spec)

    def _check_after_backward(self, results: list[Any], run: DistributedDataParallel) -> None:
        """DDP averages nothing in a bucket that misses a gradient, and says so one step late: say it at once."""
        queued = False

        def check() -> None:
            missing = [name for name, p in self.module.named_parameters() if p.requires_grad and p.grad is None]
            if missing:
                names = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
                raise GradientError(
                    f"{len(missing)} parameters got no gradient ({names}), "
                    "so the gradients of this step are not averaged over the ranks; "
                    "pass parallelize(..., find_unused_parameters=True), or freeze them with requires_grad_(False)"
                )

        def reached(gradient: Tensor) -> None:
            nonlocal queued
            if not queued and run.require_backward_grad_sync:
                queued = True
                torch.autograd.Variable._execution_engine.queue_callback(check)

        for result in results:
            if isinstance(result, Tensor) and result.requires_grad:
                result.register_hook(reached)

    def train(self, mode: bool = True) -> "ParallelModel":
        """As `nn.Module.train`, for the model and for DDP around it."""
        super().train(mode)
        self.__dict__["_run"].train(mode)
        return self

    def no_sync(self) -> AbstractContextManager[None]:
        """As DDP's: gradients are accumulated here, and averaged by the first backward outside."""
        run = self.__dict__["_run"]
        return run.no_sync() if isinstance(run, DistributedDataParallel) else nullcontext()


class _Spec:
    """Where the shells were in nested values: opaque to DDP."""

    def __init__(self, tree: TreeSpec, layouts: list[Layout | None]):
        self.tree, self.layouts = tree, layouts


class _Undressed(nn.Module):
    """The model between a door where shells come off and one where they are put on."""

    def __init__(self, model: nn.Module, gather: bool):
        super().__init__()
        self.model = model
        self.gather = gather

    def forward(self, leaves: list[Any], spec: _Spec) -> tuple[list[Any], _Spec]:
        if self.gather:
            spec = _Spec(
                spec.tree, [lay and layout_of(lay.spatial, lay.shape, lay.placements, True) for lay in spec.layouts]
            )
        args, kwargs = _put_on(leaves, spec)
        return _take_off(self.model(*args, **kwargs))


def _take_off(tree: Any) -> tuple[list[Any], _Spec]:
    leaves, spec = tree_flatten(tree)
    layouts = [leaf._layout if isinstance(leaf, SpatialTensor) else None for leaf in leaves]
    return [local_of(leaf) if isinstance(leaf, SpatialTensor) else leaf for leaf in leaves], _Spec(spec, layouts)


def _put_on(leaves: list[Any], spec: _Spec) -> Any:
    dressed = [
        wrap(leaf, layout) if layout is not None else leaf for leaf, layout in zip(leaves, spec.layouts, strict=True)
    ]
    return tree_unflatten(dressed, spec.tree)


def _share_random_state(spatial: Spatial) -> None:
    """What is drawn for whole values (stochastic depth, say) must be equal on all ranks of a replica."""
    if spatial.size == 1:
        return
    first = spatial.replica_ranks[0]
    states = [torch.get_rng_state()]
    if torch.cuda.is_available():
        states.append(torch.cuda.get_rng_state())
    device = spatial.mesh.device_type
    shared: list[Tensor] = []
    for state in states:
        carried = state.to(device)
        dist.broadcast(carried, first, group=spatial.replica)
        shared.append(carried.cpu())
    torch.set_rng_state(shared[0])
    if len(shared) > 1:
        torch.cuda.set_rng_state(shared[1])

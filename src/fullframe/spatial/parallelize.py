"""The user's model on a mesh: gradients averaged over all ranks by DDP or FSDP2, split tensors in and out.

DDP looks for plain tensors and their graphs, which shells do not have, so shells are taken off at its door.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
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
from fullframe.spatial.rules.hooks import when_gradient_arrives
from fullframe.spatial.sharding import ShardedParameters, is_sharded, require_whole
from fullframe.spatial.tensor import Layout, SpatialTensor, layout_of, local_of, wrap

_SYNC_BUFFERS = "forward_sync_buffers"  # in each forward; torch before 2.13 calls it broadcast_buffers
if _SYNC_BUFFERS not in inspect.signature(DistributedDataParallel).parameters:
    _SYNC_BUFFERS = "broadcast_buffers"
_BUCKET_BYTES = 25 << 20  # of a message in which buffers travel together


def parallelize(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    unsupported: Literal["error", "gather"] = "error",
    find_unused_parameters: bool = False,
    shard_parameters: bool = False,
    average_gradients: bool = True,
) -> "ParallelModel":
    """`model`, unchanged, for split tensors on `mesh`, with gradients averaged over data x height x width.

    Parameters and buffers are taken from the job's first rank, random states from the first rank of each replica.
    An op without an exact rule raises `UnsupportedOp`, or with `unsupported="gather"` runs whole on every rank and
    says so once. `find_unused_parameters` is DDP's. With `shard_parameters` each rank keeps its part of parameters,
    gradients and optimizer state (FSDP2, by repeated block and the rest; modules that were given to `fully_shard`
    before stay as they are): make the optimizer after this call. Without `average_gradients` each rank is left with
    its own gradient, of which the mean over all ranks is the model's.
    """
    if unsupported not in ("error", "gather"):
        raise ValueError(f"unsupported must be 'error' or 'gather', got {unsupported!r}")
    if shard_parameters and not average_gradients:
        raise ValueError("shard_parameters averages gradients; leave out average_gradients=False")
    if isinstance(model, (ParallelModel, DistributedDataParallel)):
        raise MeshError(f"the model is wrapped already ({type(model).__name__}); pass the plain model")
    spatial = spatial_of(mesh)
    _share_random_state(spatial)
    run: nn.Module = _Undressed(model, unsupported == "gather")
    sharded = None
    if dist.get_world_size() > 1:
        if not shard_parameters:
            require_whole(model)
        _share_values(model)
        if shard_parameters:
            sharded = ShardedParameters(model, mesh.device_type, find_unused_parameters)
        elif average_gradients and any(p.requires_grad for p in model.parameters()):
            several = dist.get_world_size() > spatial.size  # within one replica the buffers stay equal by themselves
            run = DistributedDataParallel(
                run,
                find_unused_parameters=find_unused_parameters,
                gradient_as_bucket_view=True,  # a gradient lies in its bucket, not beside it
                **{_SYNC_BUFFERS: several},  # type: ignore[arg-type]
            )
    return ParallelModel(model, run, sharded, spatial, find_unused_parameters, average_gradients)


class ParallelModel(nn.Module):
    """What `parallelize` returns; the user's model is `.module`, as in DDP."""

    def __init__(
        self,
        model: nn.Module,
        run: nn.Module,
        sharded: ShardedParameters | None,
        spatial: Spatial,
        find_unused_parameters: bool,
        average_gradients: bool,
    ):
        super().__init__()
        self.module = model
        self.__dict__["_run"] = run  # hidden from nn.Module, so that parameters are named module.xxx and once
        self._sharded = sharded
        self._replicas = dist.get_world_size() // spatial.size
        self._syncing = True  # outside no_sync()
        self._queued = False  # a check at the end of the backward pass that is running
        self.find_unused_parameters = find_unused_parameters
        self.average_gradients = average_gradients

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own forward; split tensors anywhere in nested arguments and results."""
        run = self.__dict__["_run"]
        if not isinstance(run, DistributedDataParallel):
            self._share_buffers()
        if self._sharded is not None:
            self._sharded.begin()
        leaves, spec = _take_off((args, kwargs))
        results, spec = run(leaves, spec)
        if self._sharded is not None or isinstance(run, DistributedDataParallel):
            self._check_after_backward(results)
        return _put_on(results, spec)

    def _share_buffers(self) -> None:
        """As DDP does: what one replica's samples make of the running statistics holds for all."""
        buffers = [buffer for buffer in self.module.buffers() if buffer.numel()]
        if self._replicas > 1 and self.training and buffers:
            dist._broadcast_coalesced(dist.distributed_c10d._get_default_group(), buffers, _BUCKET_BYTES, 0)

    def _check_after_backward(self, results: list[Any]) -> None:
        """After the backward pass in which gradients are averaged: each parameter has one, or an error says so.

        DDP averages nothing in a bucket that misses a gradient, and says so one step late: say it at once.
        """
        self._queued = False

        def reached(gradient: Tensor) -> None:
            if not self._queued and self._syncing:
                self._queued = True
                torch.autograd.Variable._execution_engine.queue_callback(self._after_backward)

        for result in results:
            if isinstance(result, Tensor) and result.requires_grad:
                when_gradient_arrives(result, reached)

    def _after_backward(self) -> None:
        self._queued = False
        if self.find_unused_parameters:
            if self._sharded is not None:
                self._sharded.forget_zeros()
            return
        if self._sharded is not None:
            missing = self._sharded.missing()
        else:
            missing = [name for name, p in self.module.named_parameters() if p.requires_grad and p.grad is None]
        if missing:
            names = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
            raise GradientError(
                f"{len(missing)} parameters got no gradient ({names}), "
                "so the gradients of this step are not averaged over the ranks; "
                "pass parallelize(..., find_unused_parameters=True), or freeze them with requires_grad_(False)"
            )

    def train(self, mode: bool = True) -> "ParallelModel":
        """As `nn.Module.train`, for the model and for DDP around it."""
        super().train(mode)
        self.__dict__["_run"].train(mode)
        return self

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """As DDP's: gradients are accumulated here, and averaged by the first backward outside."""
        with getattr(self.__dict__["_run"], "no_sync", nullcontext)():
            before = self._syncing
            self._sync(False)
            try:
                yield
            finally:
                self._sync(before)

    def _sync(self, on: bool) -> None:
        self._syncing = on
        if self._sharded is not None:
            self._sharded.set_gradient_sync(on)


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


def _share_values(model: nn.Module) -> None:
    """Parameters and buffers of the job's first rank, but for those that are sharded, which are equal by nature."""
    for tensor in (*model.parameters(), *model.buffers()):
        if not is_sharded(tensor):
            dist.broadcast(tensor.detach(), 0)


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

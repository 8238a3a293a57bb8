"""The user's model on a mesh: gradients averaged over all ranks by DDP or FSDP2, split tensors in and out."""

import copy
import inspect
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from threading import get_ident
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_iter

from fullframe.arguments import checked
from fullframe.errors import ArgumentError, CheckpointError, GradientError, MeshError, StrategyError
from fullframe.model.averaging import Averaging
from fullframe.model.buffers import require_whole_buffers, share_buffers
from fullframe.model.compiled.blocks import CompiledBlocks, compiled_blocks
from fullframe.model.containers import put_back, values_in
from fullframe.model.door import Undressed, require_no_ddp_around, unwrapped, wrapped
from fullframe.model.same.model import require_same_model
from fullframe.model.same.program import Agreement
from fullframe.model.sharding.fsdp import AtEnd, ShardedParameters
from fullframe.model.sharding.requirements import require_whole
from fullframe.model.sharding.taken import naming_shards
from fullframe.model.sharding.values import is_sharded
from fullframe.model.shares import leave_shares
from fullframe.model.sync_batchnorm import synchronize_batchnorm
from fullframe.model.trained import require_shapes
from fullframe.model.world_collectives import watch_collectives
from fullframe.ranks.mesh import Axis, Spatial, has_stages, spatial_of, stage_axis
from fullframe.ranks.random_states import share_random_states
from fullframe.ranks.raw_bytes import share_values
from fullframe.ranks.waiting import calling_a_model, naming_lost_ranks
from fullframe.spatial.rules import catalog as _rules  # noqa: F401  a split tensor is of no use without its rules
from fullframe.spatial.rules.gradient_hooks import when_gradient_arrives
from fullframe.spatial.shard import even_spec
from fullframe.spatial.tensor import leave_own_frames, left_whole, warn_of_dynamo


@checked
@naming_lost_ranks()
def parallelize(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    unsupported: Literal["error", "gather"] = "error",
    find_unused_parameters: bool = False,
    shard_parameters: bool = False,
    average_gradients: bool = True,
    compile: bool | str | Sequence[str] = False,
    data_parallel: Callable[..., nn.Module] = DistributedDataParallel,
) -> "ParallelModel":
    """`model`, unchanged, for split tensors on `mesh`, with gradients averaged over all ranks of it.

    Parameters and buffers are taken from the job's first rank, random states from the first rank of each replica.
    An op without an exact rule raises `UnsupportedOp`, or with `unsupported="gather"` runs whole on every rank and
    says so once. A parameter that gets no gradient in a step is left without one, as in one process, and named once,
    unless `find_unused_parameters` says that it is meant. With `shard_parameters` each rank keeps its part of
    parameters, gradients and optimizer state (FSDP2, by repeated block, large layer and the rest; modules that were
    given to `fully_shard` before stay as they are): make the optimizer after this call. Without `average_gradients`
    each rank is left with its own gradient, of which the mean over all ranks is the model's. With `compile` the model's
    repeated blocks, the modules of these names (fnmatch patterns), or with "all" the whole of it as one program, run
    compiled (experimental). `data_parallel` is called in the place of DistributedDataParallel, with its arguments.

    Raises ArgumentError for options that contradict each other, MeshError for a model that is wrapped already or a mesh
    that `init_mesh` did not make, ShapeError for lazy parameters, and on all ranks where they have different models.
    """
    _require_one_way(shard_parameters, average_gradients, compile)
    _require_plain(model)
    spatial = spatial_of(mesh)
    along = stage_axis(mesh) if has_stages(mesh) else None
    share_random_states(spatial, along)
    watch_collectives(mesh)
    run: nn.Module = Undressed(model, unsupported == "gather")
    sharded, averaging = None, None
    options: dict[str, Any] = {
        "unsupported": unsupported,
        "find_unused_parameters": find_unused_parameters,
        "average_gradients": average_gradients,
        "compile": compile,
        "data_parallel": data_parallel,
    }
    if dist.get_world_size() > 1:
        if not shard_parameters:
            require_whole(model)
        require_whole_buffers(model)
        require_same_model(model, options | {"shard_parameters": shard_parameters})
        synchronize_batchnorm(model, spatial.size * (1 if along is None else along.size), every=False)
        share_values(t for t in (*model.parameters(), *model.buffers()) if not is_sharded(t))  # each its own part
        if shard_parameters:
            sharded = ShardedParameters(model, spatial, find_unused_parameters)
        elif average_gradients:
            averaging = Averaging(run, model, spatial, find_unused_parameters, data_parallel)
        else:
            leave_shares(model.parameters(), spatial)
    compiled = compiled_blocks(model, compile) if compile else None
    again = partial(parallelize, mesh=mesh, **options)
    return ParallelModel(
        model, run, sharded, averaging, spatial, find_unused_parameters, average_gradients, along, compiled, again
    )


class ParallelModel(nn.Module):
    """What `parallelize` returns; the user's model is `.module`, as in DDP.

    What this class has no name for is the model's own: `model.anchors` is read from it, `model.epoch = 3` is set on it,
    and a method that is given tensors, `model.loss(batch)`, runs as a forward pass does.
    """

    def __init__(
        self,
        model: nn.Module,
        run: nn.Module,
        sharded: ShardedParameters | None,
        averaging: Averaging | None,
        spatial: Spatial,
        find_unused_parameters: bool,
        average_gradients: bool,
        along: Axis | None,
        compiled: CompiledBlocks | None,
        again: Callable[..., "ParallelModel"],
    ):
        super().__init__()
        self._run = (run,)  # in a tuple, which nn.Module does not look into: parameters are named module.xxx, and once
        self._sharded, self._averaging = sharded, averaging
        self._replicas = dist.get_world_size() // spatial.size
        self._agreement = Agreement(spatial)
        self._spatial, self._said_whole = spatial, False
        self._syncing = True  # outside no_sync()
        self._queued = False  # a check at the end of the backward pass that is running
        self._has_trained = False  # since buffers were shared
        self._are_buffers_due = True  # before the next pass in training
        self._accumulating = False  # in a pass whose step goes on with another
        self._thread = get_ident()  # the user's
        self.find_unused_parameters = find_unused_parameters
        self.average_gradients = average_gradients
        self._leave_shares = partial(leave_shares, spatial=spatial)  # of parameters that it did not have before
        self._stages = 1 if along is None else along.size  # of the mesh
        self.compiled = compiled
        self._again = again  # parallelize, as it was called for this model
        for buffer in model.buffers():
            left_whole(buffer)
        self.module = model  # the last: what is set from here on is the model's

    def __getattr__(self, name: str) -> Any:
        """What the model has of that name. Raises AttributeError where it has none, of the model's class."""
        if name in self._modules or name.startswith("_"):
            if name == "module":
                self._settle()
            return super().__getattr__(name)
        found = getattr(self.module, name)
        if isinstance(found, nn.Module) and self._averaging is not None:  # a part, to be called on its own
            self._averaging.look()
        if not inspect.ismethod(found) or found.__self__ is not self.module:
            return found

        @wraps(found)
        def method(*args: Any, **kwargs: Any) -> Any:
            if any(isinstance(leaf, Tensor) for leaf in tree_iter((args, kwargs))):
                return self._called(name, args, kwargs)
            return found(*args, **kwargs)

        return method

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets what the model has of that name, or may have."""
        mine = name.startswith("_") or name in vars(self) or hasattr(type(self), name)
        if mine or name == "module" or "module" not in self._modules:
            super().__setattr__(name, value)
        else:
            setattr(self.module, name, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> "ParallelModel":
        """A copy of the model, parallelized as this one is: an averaged or a frozen teacher. All ranks must make it.

        Raises StrategyError where parameters are sharded.
        """
        if self._sharded is not None:
            raise StrategyError(
                "sharded parameters cannot be copied; copy the plain model, and give both to fullframe.parallelize"
            )
        memo[id(self)] = made = self._again(copy.deepcopy(self.module, memo))
        made.training = self.training
        for name, hooks in vars(self).items():
            if name.endswith(("_hooks", "_hooks_with_kwargs", "_hooks_always_called")):
                setattr(made, name, copy.copy(hooks))
        return made

    def _replicate_for_data_parallel(self) -> Any:
        """Raises MeshError: nn.DataParallel calls it, to make copies of one process's model."""
        raise MeshError("nn.DataParallel knows no mesh; start one process for each GPU, without it")

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raises CheckpointError: the mesh that it is on is that of running processes."""
        raise CheckpointError(
            "a parallelized model cannot be pickled, as it is on a mesh of running processes; save model.module, or "
            "model.module.state_dict()"
        )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own forward of `args` and `kwargs`; split tensors anywhere in nested arguments and results.

        Raises what the model raises, and ArgumentError where it is traced or exported. Its backward pass raises
        GradientError for gradients of gradients (create_graph=True) with `shard_parameters`.
        """
        if torch.jit.is_tracing() or torch.compiler.is_exporting():
            raise ArgumentError(
                "a parallelized model cannot be traced or exported (torch.jit, ONNX, torch.export), as it is on a mesh "
                "of running processes; give model.module and whole tensors, x.full()"
            )
        if is_dynamo_compiling():  # it would take minutes to follow DDP's code and ours, and break at each op
            return torch._dynamo.disable(self._as_it_is)(*args, **kwargs)
        return self._called("", args, kwargs)

    @naming_lost_ranks()
    @naming_shards()
    @calling_a_model()
    def _called(self, method: str, args: Any, kwargs: Any) -> Any:
        """The model, or a method of it, called by way of the door and DDP."""
        leave_own_frames()
        self._thread = get_ident()
        if self._averaging is not None:
            require_no_ddp_around(self)
        run = self._as_called
        if self._replicas > 1 and (self.training or self._has_trained):
            require_whole_buffers(self.module)
            by_ddp = hasattr(run, "require_backward_grad_sync")  # also a simulated one
            if not by_ddp and (self._are_buffers_due or not self.training):
                share_buffers(self.module)  # as it does: what one replica's samples make of them holds for all
            # Without sharded parameters a replica may evaluate alone.
            self._has_trained = self.training and self._sharded is not None
        if self._sharded is not None:
            self._are_buffers_due = self._syncing and not self._accumulating and torch.is_grad_enabled()  # as DDP
            self._settle()
            self._sharded.begin()
        given = values_in((args, kwargs))
        leaves, shells = unwrapped((args, kwargs))
        is_split = any(spec is not None for spec in shells.specs)
        if not is_split and not self._said_whole and self.training and torch.is_grad_enabled():
            self._say_whole(leaves, 5 if method else 7)
        rebuilds = torch.is_grad_enabled() and not getattr(run, "_has_rebuilt_buckets", True)
        self._agreement.before_forward(is_split, rebuilds)
        if self._sharded is not None:
            with self._sharded.running(method):
                results, shells, within = run(leaves, shells)
        else:
            results, shells, within = run(leaves, shells, method)
        trained = () if self._averaging is None else self._averaging.parameters
        stepped = getattr(self._averaging or self._sharded, "stepped", None)
        self._agreement.after_forward([*results, *within], trained, self.module, stepped)
        if self._sharded is not None:
            self._sharded.end()
        if self._averaging is not None:
            self._averaging.called()
        self._watch_backward([*results, *within])
        result, written = wrapped(results, shells)
        put_back(given, written)
        return result

    def _as_it_is(self, *args: Any, **kwargs: Any) -> Any:
        warn_of_dynamo()
        return self.forward(*args, **kwargs)

    @property
    def _as_called(self) -> nn.Module:
        """The model as it is called, with DDP around it where there is one."""
        if self._averaging is None:
            return self._run[0]
        if torch.is_grad_enabled():
            self._averaging.arrange()
        return self._averaging.run

    @property
    def gradient_buckets(self) -> list[Tensor]:
        """The memory in which a simulated DDP keeps gradients, tensors with one dim; torch's own shows none."""
        return getattr(self._as_called, "buckets", [])

    def _say_whole(self, leaves: list[Any], frames: int) -> None:
        """Where images come in whole that could be split; the call of the model is so many frames up."""
        images = (tuple(leaf.shape) for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim() > 3)
        whole = [shape for shape in images if even_spec(shape, self._spatial.mesh).placements]
        if self._spatial.size == 1 or not whole:
            return
        self._said_whole = True
        warnings.warn(
            f"the model got an image {whole[0]} that is not split, so each of the {self._spatial.size} ranks of a "
            "replica computes all of it: the numbers are right, and no memory or time is saved; pass split tensors, "
            "from ff.ShardedLoader (its split=[...] names what it would not split by itself) or ff.shard",
            stacklevel=frames,
        )

    def _watch_backward(self, results: list[Any]) -> None:
        """In the backward pass in which gradients are averaged: see which parameters get none."""
        averaging, self._queued = self._averaging, False
        if averaging is None and self._sharded is None:
            return

        def reached(gradient: Tensor) -> None:
            if averaging is not None:
                averaging.reached()
            elif torch.is_grad_enabled():
                raise GradientError(
                    "gradients of gradients (create_graph=True) are asked for with shard_parameters=True, where "
                    "parameters are gone after the first backward; do without shard_parameters"
                )
            elif not self._queued and self._sharded is not None:
                self._queued = True
                self._sharded.begin_backward()
                torch.autograd.Variable._execution_engine.queue_callback(AtEnd(self._after_backward, self._abandoned))

        for result in results:
            if isinstance(result, Tensor) and result.requires_grad:
                when_gradient_arrives(result, reached)

    def _abandoned(self) -> None:
        """A backward pass of sharded parameters has ended by an error: what is written to them next is to stay.

        A GPU's thread, which may let go of it later, leaves that to the user's, which may be in another pass by then.
        """
        if self._queued and self._sharded is not None and get_ident() == self._thread:
            self._queued = False
            self._sharded.abandon()

    def _settle(self) -> None:
        """The same, before the model or its parameters are handed to the user's thread, outside backward."""
        if self._queued and torch._C._current_graph_task_id() < 0:
            self._abandoned()

    def _after_backward(self) -> None:
        """Of sharded parameters."""
        assert self._sharded is not None
        self._queued = False
        self._sharded.end_backward(self._syncing)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """As `nn.Module.named_parameters`, `args` and `kwargs` included."""
        self._settle()
        return super().named_parameters(*args, **kwargs)

    def train(self, mode: bool = True) -> "ParallelModel":
        """As `nn.Module.train(mode)`, for the model and for DDP around it."""
        super().train(mode)
        self._as_called.train(mode)
        return self

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """As DDP's: gradients are accumulated here, and averaged by the first backward outside."""
        before = self._syncing
        self._sync(False)
        try:
            yield
        finally:
            self._sync(before)

    @contextmanager
    def _keeping_buffers(self) -> Iterator[None]:
        """As in `no_sync()` each replica goes on with its own buffers, but gradients are sent."""
        self._accumulating = True
        try:
            yield
        finally:
            self._accumulating = False

    def _average_left(self) -> None:
        """Average what passes in `no_sync()` have left where no pass came after them; all ranks call it."""
        if self._averaging is not None:
            self._averaging.average_left()

    def _sync(self, on: bool) -> None:
        self._syncing = on
        if self._averaging is not None:
            self._averaging.sync(on)
        if self._sharded is not None:
            self._sharded.set_gradient_sync(on)


def _require_one_way(shard_parameters: bool, average_gradients: bool, compile: bool | str | Sequence[str]) -> None:
    """Raises ArgumentError for options of `parallelize` that contradict each other."""
    if shard_parameters and not average_gradients:
        raise ArgumentError("shard_parameters averages gradients; leave out average_gradients=False")
    if shard_parameters and compile == "all":
        raise ArgumentError(
            'compile="all" makes one program, inside which sharded parameters cannot be gathered block by block; use '
            "compile=True, or leave out shard_parameters"
        )


def _require_plain(model: nn.Module) -> None:
    """Raises MeshError for a model that is wrapped, ShapeError where its first call is to decide shapes."""
    if isinstance(model, (ParallelModel, DistributedDataParallel)):
        raise MeshError(f"the model is wrapped already ({type(model).__name__}); pass the plain model")
    require_shapes(model)

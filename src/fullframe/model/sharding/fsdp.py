"""Parameters, gradients and optimizer state spread over all ranks of the job, by torch's FSDP2.

Each unit (a repeated block, a large layer, the rest of the model) gathers its parameters before it runs, forward and
backward, and lets go of them afterwards. Every rank holds a part of the job's mean gradient, so all ranks together form
the one mesh.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_map_only

from fullframe.errors import DivergenceError, GradientError, MeshError, StrategyError
from fullframe.model.containers import GivenBack
from fullframe.model.forward_patch import PatchedForward, unpatch
from fullframe.model.same.optimizers import Stepped, require_same_options
from fullframe.model.sharding.kept_whole import KeptWhole, average
from fullframe.model.sharding.left import LeftIn
from fullframe.model.sharding.memory_format import lay_contiguous
from fullframe.model.sharding.requirements import (
    Noted,
    require_all_ranks,
    require_called,
    require_dense,
    require_no_hooks,
    require_no_script,
    require_own_memory,
)
from fullframe.model.sharding.steps_taken import begin_anew, note_step, require_same_steps, steps_taken
from fullframe.model.sharding.taken import Lending, Replaced, stand_in
from fullframe.model.sharding.torch_units import require_sharded_ones, sharded_in, take_up_data
from fullframe.model.sharding.units import units_to_shard
from fullframe.model.sharding.values import (
    is_sharded,
    leave_step,
    mind_sharded_values,
    take_whole_optimizer_states,
    take_whole_states,
)
from fullframe.model.sharding.written import WrittenIn
from fullframe.model.shares import leave_shares
from fullframe.model.unused import say_unused
from fullframe.ranks.agreement import first_difference, from_all_ranks, on_any_rank_each
from fullframe.ranks.mesh import Spatial
from fullframe.spatial.gradients import is_managed
from fullframe.spatial.tensor import SpatialTensor
from fullframe.wording import first_of

_MOST_RUN = 10_000  # units that are remembered, of forward passes that no backward pass follows


class ShardedParameters:
    """Shards the parameters of `model` over all ranks, in place, and keeps the gradients as DDP would.

    Modules that the user has passed to `fully_shard` stay as they are.

    Raises MeshError when those are sharded over other ranks, the model has no forward, TorchScript compiled a module, a
    parameter shares its memory, or a table's gradient is sparse.
    """

    def __init__(self, model: nn.Module, spatial: Spatial, find_unused_parameters: bool):
        from torch.distributed.fsdp import FSDPModule

        mind_sharded_values()
        require_called(model)
        require_all_ranks(model)
        require_no_hooks(model)
        require_no_script(model)
        require_own_memory(model)
        lay_contiguous(model)
        begin_anew()
        mesh = DeviceMesh(spatial.mesh.device_type, torch.arange(dist.get_world_size()), mesh_dim_names=("ranks",))
        held = {p: (each, own) for each in model.modules() for own, p in each._parameters.items()}
        self._whole: dict[str, KeptWhole] = {}
        self._apart: set[nn.Parameter] = set()  # of which each rank has all
        self._given_back: list[GivenBack] = []
        written = self._shard(model, mesh, spatial.channel.tagged)
        kept = set(model.parameters())
        for module in {module for module, _ in held.values()}:
            take_whole_states(module, self.abandon)
        for parameter in held.keys() - kept - {None}:
            stand_in(parameter, *held[parameter])
        self._root: Any = model
        self._spatial = spatial
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._got: set[str] = set()  # parameters that got a gradient on this rank since the last exchange
        for name, parameter in self._parameters.items():
            parameter.register_hook(Noted(name, self._got))
        self._had: set[str] = set()  # parameters that had one before this backward pass
        is_real = spatial.channel.tagged  # no simulation
        self._several = is_real and dist.get_world_size() > spatial.size  # replicas, which may differ
        self._ran: deque[str] = deque(maxlen=_MOST_RUN)  # units, since the ranks last compared them
        self._is_said = find_unused_parameters or not is_real
        self._sends_zeros = hasattr(model, "set_reduce_scatter_unused_params")
        if find_unused_parameters and not self._sends_zeros:
            raise MeshError(
                f"torch {torch.__version__} cannot shard parameters of which some get no gradient; "
                "use torch 2.13 or later, freeze them with requires_grad_(False), or leave out find_unused_parameters"
            )
        self._lending, self._watched = Lending(model), set[str]()
        self._is_spoiled = False  # by an error in a pass
        self.stepped = Stepped(model)
        units = {name: module for name, module in model.named_modules() if isinstance(module, FSDPModule)}
        self._units = list(units.values())
        for kind in {type(unit) for unit in self._units}:
            kind.__deepcopy__ = _refuse_copy  # type: ignore[attr-defined]
        for name, unit in units.items():
            self._prepare(name, unit, written.get(name))

    def _shard(self, model: nn.Module, mesh: DeviceMesh, is_real: bool) -> dict[str, WrittenIn]:
        """Has torch shard the units that are ours; what looks at each one's parameters, by its name."""
        from torch.distributed.fsdp import FSDPModule, fully_shard

        written: dict[str, WrittenIn] = {}
        for name in ("", *units_to_shard(model))[::-1]:
            module = model.get_submodule(name)
            if not isinstance(module, FSDPModule):
                self._whole[name] = whole = KeptWhole(module, name, mesh)
                require_dense(name, module)
                written[name] = WrittenIn(module, name, is_real)
                self._given_back.append(given_back := GivenBack(module))
                module.register_forward_hook(_without_views)  # before torch's own, which hooks what it returns
                LeftIn(module, name)
                whole.attend()
                self._apart |= whole.parameters
                # Also the root: torch would keep its parameters whole after a forward pass without a backward pass,
                # and go on with those when the optimizer or an average has long changed the sharded ones.
                fully_shard(module, mesh=mesh, reshard_after_forward=True, ignored_params=self._apart)
                given_back.finish()
        return written

    def _prepare(self, name: str, unit: Any, written: WrittenIn | None) -> None:
        if self._sends_zeros:
            # A rank that lacks a gradient sends zeros, for the other ranks' messages must meet one of their size.
            unit.set_reduce_scatter_unused_params(True, recurse=False)
        replaced = self._whole[name].replaced if name in self._whole else list[Any]
        unit.register_forward_pre_hook(lambda module, args: require_sharded_ones(name, unit, replaced()), prepend=True)
        unit.register_forward_pre_hook(lambda module, args: self._gathered(name, unit))  # after torch's own
        if name and written is not None:
            whole = self._whole[name]
            modules = list(dict.fromkeys([*written.modules, *whole.modules]))
            self._lending.lend(
                unit, modules, lambda: self._taken(name, unit, written), lambda: self._end(name, written)
            )

    def _taken(self, name: str, unit: Any, written: WrittenIn) -> None:
        self._whole[name].put_in()
        self._gathered(name, unit)
        written.begin()

    def _end(self, name: str, written: WrittenIn) -> None:
        self._whole[name].take_out()
        written.end()

    def _gathered(self, name: str, unit: Any) -> None:
        """Its whole parameters are in the modules."""
        if self._several:
            self._ran.append(name)
        if name in self._watched:
            return
        self._watched.add(name)
        if torch.is_inference_mode_enabled():
            raise MeshError(
                "what sharded parameters are first gathered into is what training goes on with; "
                "use torch.no_grad() rather than torch.inference_mode(), or take a training step before"
            )
        for own, parameter in unit.named_parameters(prefix=name):
            if parameter.requires_grad and not is_sharded(parameter):
                leave_shares([parameter], self._spatial)
                parameter.register_post_accumulate_grad_hook(self._noting(own))

    def _noting(self, name: str) -> Callable[[Tensor], None]:
        """Not where a Function's backward gave None, of which torch tells the hook, too."""
        return lambda parameter: None if parameter.grad is None else self._got.add(name)

    def begin(self) -> None:
        """A forward pass begins. Raises GradientError where torch would pass over what the user has changed."""
        leave_step()
        if self._is_spoiled and torch.is_grad_enabled():
            raise GradientError(
                f"a pass with sharded parameters has ended by an error, after which torch {torch.__version__} gives "
                "other gradients; use torch 2.13 or later, start again from a checkpoint, or do without "
                "shard_parameters"
            )
        self._lending.begin()
        for each in self._given_back:
            each.begin()
        trained = {name: p for name, p in self._root.named_parameters() if p.requires_grad}
        changed = sorted(trained.keys() ^ self._parameters.keys())
        new = sorted(name for name, p in trained.items() if not is_sharded(p) and not is_managed(p))
        if new and torch.is_grad_enabled():
            raise GradientError(
                f"{first_of(new)} came into the model after the parameters were "
                "sharded, and its gradient would not be averaged; replace modules before parallelize, or do without "
                "shard_parameters"
            )
        if changed and torch.is_grad_enabled():
            raise GradientError(
                f"requires_grad of {first_of(changed)} has changed since the "
                "parameters were sharded, and its gradient would not be averaged; freeze and unfreeze before "
                "parallelize, or do without shard_parameters"
            )
        for unit in self._units:
            take_up_data(unit)
        require_no_hooks(self._root)

    @contextmanager
    def running(self, method: str) -> Iterator[None]:
        """Inside, the model is called once: its forward, or that method of it between the hooks that gather parameters.

        After an error all are sharded again, as what is done to them next would be lost in those that were gathered.
        """
        patch = None
        if method:
            self._root.forward = patch = _Once(self._root, getattr(self._root, method))
        try:
            yield
        except BaseException:
            self.abandon()
            raise
        finally:
            if patch is not None and vars(self._root).get("forward") is patch:  # a hook before it has raised
                unpatch(self._root)

    def abandon(self) -> None:
        """A pass has ended by an error: all are sharded again, and have no more gradients than that."""
        if not self._watched:  # it has not begun
            return
        self._is_spoiled = not hasattr(self._root, "reset_iter_state")  # before torch 2.13
        if not self._is_spoiled:
            self._root.reset_iter_state()
        for kept in self._whole.values():
            kept.forget()
        for unit in self._units:
            unit.reshard()
            for each in sharded_in(unit):
                if "unsharded_accumulated_grad" in vars(each):  # until torch 2.15
                    each.unsharded_accumulated_grad = None
                if hasattr(each, "_unsharded_param"):
                    each._unsharded_param.grad = None

    def end(self) -> None:
        """A forward pass has ended. Raises DivergenceError on all ranks where it was another one on some replica."""
        if self._several and not torch.is_grad_enabled():
            self._on_any_rank_each([])  # else after its backward pass, with what is sent anyway

    def _on_any_rank_each(self, flags: Sequence[bool]) -> list[bool]:
        """As of `agreement`; raises DivergenceError where replicas have gathered different units for one another.

        Likewise where they have taken other steps.
        """
        said = self.stepped.said()
        taken = crc32(repr(said).encode(), steps_taken())
        found, alike = on_any_rank_each(flags, crc32("\n".join(self._ran).encode(), taken))
        self.stepped.compared()
        ran = list(self._ran)
        self._ran.clear()
        if not alike:
            require_same_options(from_all_ranks(said), range(dist.get_world_size()))
            require_same_steps(from_all_ranks(steps_taken()))
            mine, rank, other = first_difference(from_all_ranks(ran))
            raise DivergenceError(
                f"the replicas ran different blocks, and took one's parameters for another's: where rank 0 ran "
                f"{mine}, rank {rank} ran {other}; skip blocks alike on all replicas, or do without "
                "shard_parameters"
            )
        return found

    def forget_zeros(self) -> None:
        """After an exchange of gradients: a parameter that got none on any rank has none, rather than zeros.

        Raises GradientError where torch, before 2.13, sends nothing for such a parameter, DivergenceError on all ranks
        where replicas ran different blocks.
        """
        used = [name in self._got for name in self._parameters]
        self._got.clear()
        used = self._on_any_rank_each(used) if self._several else used  # within a replica all ranks have the same
        self.stepped.compared()
        unused = [name for name, is_used in zip(self._parameters, used, strict=True) if not is_used and any(used)]
        parts = [name for name in unused if self._parameters[name] not in self._apart]
        if parts and not self._sends_zeros:  # none where it was `autograd.grad`, of an input say
            raise GradientError(
                f"{len(parts)} parameters got no gradient ({first_of(parts)}), "
                f"for which torch {torch.__version__} sends nothing; use torch 2.13 or later, freeze them with "
                "requires_grad_(False), or do without shard_parameters"
            )
        if unused and not self._is_said:
            self._is_said = True
            say_unused(unused)
        came = {parameter for parameter, is_used in zip(self._parameters.values(), used, strict=True) if is_used}
        average(kept for whole in self._whole.values() for kept in whole.of(came))
        for name, is_used in zip(self._parameters, used, strict=True):
            if not is_used and name not in self._had:
                self._parameters[name].grad = None

    def begin_backward(self) -> None:
        """A backward pass of the model has reached its results."""
        self._had = {name for name, p in self._parameters.items() if p.grad is not None}
        self._lending.gather()
        for whole in self._whole.values():  # for a forward that is computed again without the unit's hooks
            whole.put_in()

    def end_backward(self, averaged: bool) -> None:
        """And has ended. Raises as `forget_zeros`."""
        self._lending.give_back()
        for whole in self._whole.values():
            whole.take_out()
        if averaged:
            self.forget_zeros()

    def set_gradient_sync(self, on: bool) -> None:
        """Whether backward averages gradients over the ranks, or adds them up whole on each."""
        self._root.set_requires_gradient_sync(on)


class AtEnd:
    """To be queued in a backward pass: calls `ended` at its end, or `failed` where torch drops it, as for an error."""

    def __init__(self, ended: Callable[[], None], failed: Callable[[], None]):
        self._ended, self._failed, self._is_called = ended, failed, False

    def __call__(self) -> None:
        self._is_called = True
        self._ended()

    def __del__(self) -> None:
        if not self._is_called:
            self._failed()


def _before_a_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Of any optimizer. Raises GradientError where it has parameters that were sharded since it was made."""
    if any(is_sharded(parameter) for group in optimizer.param_groups for parameter in group["params"][:1]):
        take_whole_optimizer_states(optimizer)
        note_step(optimizer)
    if any(isinstance(parameter, Replaced) for group in optimizer.param_groups for parameter in group["params"]):
        raise GradientError(
            "the optimizer was made before parallelize(..., shard_parameters=True), which has put other parameters in "
            "the place of those that it has, so it would train nothing; make it afterwards, of model.parameters()"
        )


register_optimizer_step_pre_hook(_before_a_step)


class _Once(PatchedForward):
    """In the place of an FSDP2 module's forward for one call of the module."""

    def __init__(self, module: Any, method: Callable[..., Any]):
        super().__init__(module)
        self._module, self._method = module, method

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        unpatch(self._module)
        self._module.set_reshard_after_forward(False, recurse=False)  # the method may call its own forward in between
        try:
            return self._method(*args, **kwargs)
        finally:
            self._module.set_reshard_after_forward(True, recurse=False)


def _without_views(module: nn.Module, args: Any, output: Any) -> Any:
    """The output with copies in place of plain views.

    Torch gathers a unit's parameters for backward by a hook on its output, which a view loses when something is
    written to it in place: backward would go on with freed parameters. A split tensor puts the hook on its base.
    """
    return tree_map_only(Tensor, lambda t: t.clone() if _loses_hooks(t) else t, output)


def _refuse_copy(module: nn.Module, memo: dict[int, Any]) -> NoReturn:
    raise StrategyError(
        "sharded parameters cannot be copied with their module, as AveragedModel does, too; keep an average by names, "
        "{name: p.detach().clone() for name, p in model.named_parameters()}, and write to it by mul_ and add_, or copy "
        "the plain model, and give both to fullframe.parallelize"
    )


def _loses_hooks(value: Tensor) -> bool:
    return value.requires_grad and not isinstance(value, SpatialTensor) and value._is_view()

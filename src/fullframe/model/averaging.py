"""Gradients of a model's parameters averaged over all ranks: by DDP what DDP expects, the rest at the end of backward.

DDP averages in the first backward pass after its forward pass, the parameters it was made for. A second loss of the
same forward pass, a part of the model called on its own, `autograd.grad` and the hooks of users are seen to here.
"""

import weakref
from collections.abc import Callable, Iterable
from itertools import chain, compress
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from fullframe.errors import GradientError
from fullframe.model.ddp import DataParallel
from fullframe.model.gradient_memory import Buckets, Placed, chunks, means_over_ranks
from fullframe.model.hooked import MeansForHooks
from fullframe.model.same.optimizers import Stepped
from fullframe.model.same.weights import WeightsInTurn
from fullframe.model.trained import Trained, frozen, late, trained
from fullframe.model.unused import Unused, give_zeros, has_hooks, put_back
from fullframe.ranks.agreement import on_any_rank
from fullframe.ranks.mesh import Spatial
from fullframe.ranks.raw_bytes import share_values
from fullframe.spatial.gradients import Hook, is_accumulated, manage, mean_over_ranks, reaches_any

_owners: Any = WeakIdKeyDictionary()  # of a parameter, the `Averaging`s that train it
_all: Any = weakref.WeakSet()  # every `Averaging` that there is


class Averaging:
    """DDP around `door`, which calls `model`; made anew when other parameters of the model are trained.

    So it is when they are moved or get another dtype, and when a backward pass has ended by an error. Parameters that
    the model did not have before take the first rank's values, as all do in `parallelize`, where it is called; a part
    of it that is called on its own wants them equal.
    """

    def __init__(
        self,
        door: nn.Module,
        model: nn.Module,
        spatial: Spatial,
        find_unused_parameters: bool,
        data_parallel: Callable[..., nn.Module],
    ):
        self._door, self._model, self._spatial = door, model, spatial
        self._find_unused = find_unused_parameters
        self._unused = Unused(model, varies=find_unused_parameters)
        self._several = dist.get_world_size() > spatial.size and spatial.channel.tagged  # replicas, which may differ
        self._make_ddp = DataParallel(data_parallel, spatial.mesh.device_type, self._several)
        self._joins = self._several and not find_unused_parameters  # in hooks of what another replica alone may use
        self._for_hooks = MeansForHooks(spatial, self._joins)
        self._shared: Any = WeakIdKeyDictionary(dict.fromkeys(model.parameters()))  # equal on all ranks
        self._unshared: list[nn.Parameter] = []  # which may not be
        self.parameters: Trained = {}  # those that are trained, as far as is known
        self._ddp: Any = None
        self._for: Trained = {}  # those that `_ddp` averages
        self._edges: dict[nn.Parameter, GradientEdge] = {}  # of theirs, to where DDP's hooks are
        self._astray = False  # gradients of some came elsewhere
        self._alone: set[nn.Parameter] = set()  # those whose gradients of no_sync() are not averaged yet
        self._buckets, self._placed = Buckets(), Placed()
        door.register_forward_pre_hook(self._placed.give_back)  # by then DDP has made its buckets again
        self._frozen: list[nn.Parameter] = []  # the model's others
        self._changed = False  # what is trained, since the ranks last compared it
        self._is_behind = False  # DDP was made for what was trained before that
        self._lent = False  # the model computes with tensors made of parameters (`torch.func.functional_call`)
        self._expects = False  # DDP: a backward pass to average in
        self._began = False  # that pass
        self._pass: Any = lambda: None  # the backward pass that is running
        self.syncing = True  # outside no_sync()
        self._weights = WeightsInTurn(spatial if self._several else None)
        self.stepped = Stepped(model)
        _all.add(self)
        self.arrange()

    @property
    def run(self) -> nn.Module:
        """What to call in the place of the door."""
        return self._door if self._ddp is None or not self.parameters or self._lent else self._ddp

    def arrange(self) -> None:
        """See which parameters are trained now."""
        self._placed.note(self._for)
        found, self._frozen = trained(self._model)
        self._lent = not all(parameter.is_leaf for parameter in found)
        if self._lent:
            return
        kept = {parameter: found[parameter] for parameter in self._for if parameter in found}
        if kept and (self._astray or (self._began and self._pass() is None)):  # it ended by an error; DDP still waits
            self._wrap(kept)
        if found != self.parameters:
            self._take_up(found)
        elif self._unused.is_known:
            return
        if self._unshared:  # a head that was put in the place of another, say, which each rank has drawn by itself
            self._share()
        # Whether all ranks have changed the same is told by the end of the pass, and until then DDP stays as it is.
        self._is_behind = self._changed and bool(kept) and kept.items() <= self._for.items()
        if self._is_behind:
            return
        wanted = self._unused.others(found)
        if wanted and wanted != self._for:
            self._wrap(wanted)

    def _take_up(self, found: Trained) -> None:
        new = [parameter for parameter in found if parameter not in self.parameters]
        self.parameters, self._changed = found, True
        self._unused.forget()
        self._unshared += [parameter for parameter in new if parameter not in self._shared]
        for parameter in new:
            owners = _owners.setdefault(parameter, weakref.WeakSet())
            owners.add(self)
            manage(parameter, _hook(weakref.ref(self), owners, weakref.ref(parameter), self._spatial))

    def _share(self) -> None:
        share_values(self._unshared)
        self._shared.update(dict.fromkeys(self._unshared))
        self._unshared = []

    def look(self) -> None:
        """See which parameters are trained beside those that are known, and send nothing."""
        found, self._frozen = trained(self._model)
        if found.keys() - self.parameters.keys() and all(parameter.is_leaf for parameter in found):
            self._take_up(found)

    def _without_ddp(self) -> None:
        """Until the model is called again."""
        if self._ddp is not None and hasattr(self._ddp, "reducer"):
            self._ddp.reducer._remove_autograd_hooks()
        self._expects, self._began, self._astray = False, False, True

    def _wrap(self, wanted: Trained) -> None:
        self._without_ddp()
        several = dist.get_world_size() > self._spatial.size  # within one replica the buffers stay equal by themselves
        self._for, self._buckets = wanted, Buckets()
        self._placed.note(wanted)
        self._ddp = None  # with its buckets, which in an evaluation's inference mode could not be trained with
        with torch.inference_mode(False), frozen([each for each in trained(self._model)[0] if each not in wanted]):
            self._ddp = self._make_ddp(self._door, sync_buffers=several)
            self._edges = {p: get_gradient_edge(p) for p in wanted} if hasattr(self._ddp, "reducer") else {}
        self._astray = False
        for parameter in wanted:  # not in DDP's buckets, into which the next pass writes: someone may keep them
            if parameter.grad is not None:
                parameter.grad = parameter.grad.clone()
        self._placed.give_back()
        self._placed.note(wanted)  # before the forward pass that follows
        self.sync(self.syncing)

    def sync(self, on: bool) -> None:
        """Whether backward passes average, from the next forward pass on."""
        self.syncing = on
        if self._ddp is not None:
            self._ddp.require_backward_grad_sync = on

    def called(self) -> None:
        """After a forward pass."""
        if not torch.is_grad_enabled():
            return
        self._for_hooks.tell(chain(self.parameters, self._frozen))
        if self.syncing and self.run is self._ddp:
            self._expects = True
            self._make_ddp.open()
        if self._frozen and not self._lent:  # which the model may unfreeze in its forward pass
            self.look()

    def reached(self) -> None:
        """In backward: a result of the model is; the pass may well be one that does not go on to parameters."""
        if self._pass() is None and reaches_any(self.parameters):
            self.begin()

    def begin(self) -> "_Pass":
        """In backward: what is known of the pass. Where backward runs within backward, of the outer one."""
        running: _Pass | None = self._pass()
        if running is None:
            self._pass = weakref.ref(running := _Pass(self))
            if self._began:  # and ended by an error; DDP would wait for the rest of that pass
                self._without_ddp()
            self._for_hooks.open(self.parameters)
            if self._expects:
                self._began = True
                self._placed.note(self._for)
                running.placed = self._placed.until_given_back()
                self._buckets.leave_to_holders()
            _at_the_end(running.check)  # which alone holds it, so that it ends with its pass, also by an error
        return running

    def arrives(self, parameter: nn.Parameter, gradient: Tensor) -> Tensor | None:
        """In backward, before the gradient is added to the parameter's; what to add instead, if anything else."""
        if torch.is_grad_enabled():
            raise GradientError(
                "backward(create_graph=True) reaches a model's parameters, whose gradients are averaged over the "
                "ranks by messages that cannot be differentiated; use torch.autograd.grad(..., create_graph=True)"
            )
        running = self.begin()
        running.arrived.add(parameter)
        edge = self._edges.get(parameter)
        if edge is not None and torch._C._current_autograd_node() is not edge.node:
            running.astray.append(parameter)
        if parameter.grad is None:
            running.made.append(parameter)
        if not self._for_hooks.are_there(parameter):
            return None
        if self._find_unused:  # replicas meet their parameters in other orders: here the ranks of one replica alone
            return mean_over_ranks(gradient, self._spatial.replica)
        return self._for_hooks.mean(gradient, parameter, self.parameters)

    def check(self, arrived: set[nn.Parameter], astray: list[nn.Parameter]) -> "_Came":
        """After a pass: what has come. DDP gets zeros for the rest, so that all ranks send alike, and all at once.

        Torch makes a parameter's end of the graph anew, without DDP's hooks, where its dtype or device changes. If it
        has changed back since (`model.cpu()`, saved, `model.cuda()`), nothing else tells. DDP hears of those `astray`,
        whose gradients lie in `.grad`, by zeros at the old end.
        """
        expected: Trained = self._for if self._expects else {}
        used = {p for p in arrived | self._alone | expected.keys() if p.grad is not None}
        lacking, reached = [p for p in expected if p not in arrived], set(arrived)  # without what zeros reach
        # Where replicas differ, another may have a hook's parameter, and wait in it for this rank's part.
        hooked = self._for_hooks.are_there if self._joins else None
        before = give_zeros(lacking, self._model, self._edges, hooked)
        beside = [p for p in self.parameters if hooked and p not in expected and hooked(p)]
        before |= give_zeros([p for p in beside if p not in reached], self._model, {}, hooked)
        if astray and self._expects:
            self._astray = True
            give_zeros(astray, self._model, self._edges)
        return _Came(used, lacking, reached, before, bool(beside))

    def finish(self, came: "_Came", made: list[nn.Parameter]) -> None:
        """After a pass, when DDP has waited for what it sent; `made` are those whose gradient torch has made in it."""
        simulated = self._ddp is not None and not hasattr(self._ddp, "reducer")
        if not self._expects:
            came = self._with_new(came)
        if self._unshared:
            (self._share if simulated else self._require_shared)()
        if not self._expects:
            everyone = self._on_any_rank(came) if (self.syncing and not simulated) or came.joins else came
            put_back(everyone.arrived, came.before)
            if not self.syncing:
                self._alone |= came.used
            elif not simulated:
                self._average(everyone.used)
                self._alone.clear()
            self._placed.remember(made)
            return
        if not simulated:
            self._ddp.reducer._check_reducer_finalized()
            self._buckets.hand_out(self._for)
            self._placed.give_back()
        self._expects = self._began = False
        self._alone.clear()
        self._settle(self._on_any_rank(came), simulated)

    def _with_new(self, came: "_Came") -> "_Came":
        """With parameters that have come to be trained since the model was called, in a pass that parts of it made."""
        known = self.parameters
        self.look()
        new = {parameter for parameter in self.parameters if parameter not in known and parameter.grad is not None}
        if any(map(has_hooks, new - came.used)):
            raise late(self._model, new, "their hooks have seen one rank's gradients")
        return came._replace(used=came.used | new)

    def _require_shared(self) -> None:
        """Raises GradientError on all ranks where a pass has made gradients by values that were not the same on all."""
        before = {parameter: parameter.detach().clone() for parameter in self._unshared}
        self._share()
        if on_any_rank(not all(torch.equal(parameter, old) for parameter, old in before.items())):
            raise late(self._model, before, "each rank has drawn its own values")

    def average_left(self) -> None:
        """Average what is not averaged yet, in which all ranks are alike."""
        if self._alone:
            left = {parameter for parameter in self._alone if parameter.grad is not None}
            self._average(self._on_any_rank(_Came(left, [], set(), {}, joins=False)).used)
            self._alone.clear()

    def _settle(self, came: "_Came", simulated: bool) -> None:
        """After DDP's pass, on all ranks alike: what is not used has no gradient, what is not DDP's is averaged too."""
        again = put_back(came.arrived, came.before) & came.used  # DDP has averaged what hooks had made of them
        for parameter in self._for.keys() - came.used:
            parameter.grad = None
        beside = came.used - self._for.keys()
        self._average(beside | again)
        if (came.lacking or beside) and not simulated and not self._is_behind:
            self._unused.learn(came.lacking, came.used)

    def _on_any_rank(self, came: "_Came") -> "_Came":
        """What came or is lacking on whichever rank, by one message; within a replica all ranks have the same."""
        if self._several:
            parameters, lacking = [*self.parameters, *self._frozen], set(came.lacking)  # as many on all ranks
            mine = [p in some for some in (came.used, lacking, came.arrived) for p in parameters]
            flags = iter(self._weights.on_any_rank_each(mine, self._model, self.parameters, self.stepped))
            used, lacks, arrived = (list(compress(parameters, flags)) for _ in range(3))
            came = came._replace(used=set(used), lacking=lacks, arrived=set(arrived))
        self._changed = False  # what is trained was compared, by that or after the forward pass
        self.stepped.compared()
        return came

    @torch.no_grad()
    def _average(self, parameters: set[nn.Parameter]) -> None:
        """Average the gradients of parameters, the same on all ranks, of which some may have none."""
        for chunk in chunks([parameter for parameter in self.parameters if parameter in parameters]):
            gradients = [torch.zeros_like(p) if p.grad is None else p.grad.to_dense() for p in chunk]
            for parameter, gradient, mean in zip(chunk, gradients, means_over_ranks(gradients), strict=True):
                parameter.grad = gradient.copy_(mean)


def _require_known(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Before any optimizer's step. Raises GradientError for gradients of which each rank has its own."""
    if not _all:
        return
    known: set[nn.Parameter] = set().union(*(averaging.parameters for averaging in _all))
    given = (parameter for group in optimizer.param_groups for parameter in group["params"])
    strangers = {parameter for parameter in given if parameter.grad is not None and parameter not in known}
    for averaging in _all if strangers else ():
        unknown = strangers.intersection(trained(averaging._model)[0])
        if unknown:
            raise late(averaging._model, unknown, "each rank has its own gradients")


register_optimizer_step_pre_hook(_require_known)


class _Came(NamedTuple):
    """Of a backward pass on this rank."""

    used: set[nn.Parameter]  # those with a gradient that is to be averaged
    lacking: list[nn.Parameter]  # those that DDP would wait for
    arrived: set[nn.Parameter]  # those that it has reached
    before: dict[nn.Parameter, Tensor | None]  # gradients of others with hooks, before these were given zeros
    joins: bool  # some with hooks are not DDP's in this pass, and all ranks tell which it has reached


class _Pass:
    """A backward pass that reaches parameters."""

    def __init__(self, averaging: Averaging):
        self._averaging = averaging
        self.arrived: set[nn.Parameter] = set()
        self.astray: list[nn.Parameter] = []  # of them, without DDP's hooks
        self.made: list[nn.Parameter] = []  # had no gradient before
        self.placed: Any = None  # to be let go of with the pass

    def check(self) -> None:
        came = self._averaging.check(self.arrived, self.astray)
        _at_the_end(lambda: self._averaging.finish(came, self.made))  # DDP, too, is called then, and later than this


def _the_one_called(owners: Iterable[Averaging]) -> Averaging | None:
    """Of those that train a parameter, whose models share it, the one whose DDP expects this pass.

    Raises GradientError where several do.
    """
    called = [owner for owner in owners if owner._expects]
    if len(called) > 1:
        raise GradientError(
            f"{len(called)} parallel models that share a trained parameter were called before this backward pass, "
            "and each would average its gradient; put the models into one nn.Module and give that to "
            "fullframe.parallelize, or freeze what they share"
        )
    return called[0] if called else None


def _hook(averaging: Any, owners: Any, parameter: Any, spatial: Spatial) -> Hook:
    """Without references: the parameter holds its hook, and the wrapper its parameters."""

    def hook(gradient: Tensor) -> Tensor | None:
        owner, own = averaging(), parameter()
        if not is_accumulated(own):
            return mean_over_ranks(gradient, spatial.replica)
        if len(owners) > 1:
            owner = _the_one_called(owners) or owner
        if owner is None:  # the wrapper is gone
            return mean_over_ranks(gradient, dist.group.WORLD)  # type: ignore[arg-type]
        return owner.arrives(own, gradient)  # type: ignore[no-any-return]

    return hook


_at_the_end: Any = torch.autograd.Variable._execution_engine.queue_callback

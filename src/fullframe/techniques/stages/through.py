"""Consecutive parts of a chain on the ranks of the mesh's axis "stage", as one differentiable call.

Each rank keeps the graph of its own part. Microbatches go forward through the stages one behind the other, then back
(GPipe: Huang et al., NeurIPS 2019). Every stage gets the same arguments and the same result, so what comes before the
chain and after it runs on all of them, and the gradients of all parameters average as those of other ranks do.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from fullframe.errors import GradientError, StrategyError
from fullframe.model.lent import lent
from fullframe.ranks.collectives import all_sum_no_grad
from fullframe.ranks.exchange import InFlight
from fullframe.ranks.randomness import kept_random_state, mixed_seed, random_state, seed_everything, set_random_state
from fullframe.ranks.stage_messages import (
    Form,
    are_real,
    flags_of_any,
    from_one,
    objects_of_all,
    receive,
    receive_object,
    receive_some,
    send,
    send_object,
    send_some,
    summed_at,
    telling_others,
)
from fullframe.spatial.operands import has_gradients
from fullframe.spatial.second_derivative import require_first
from fullframe.spatial.tensor import local_or_whole
from fullframe.spatial.views import counting
from fullframe.techniques.stages.arguments import Arguments, Begun, Kept, StageSaid, State
from fullframe.techniques.stages.buffers import StageBuffers
from fullframe.techniques.stages.chain import Chain, Criterion, OwnGraph, Segment, Stages, require_known
from fullframe.techniques.stages.pipelines import one_forward_one_backward, with_coming

_WITHOUT_SECOND = "stages", "leave stages out"


def through_stages(
    chain: Chain,
    stages: Stages,
    state: Any,
    inputs: tuple[Any, ...],
    returns_all: bool = False,
    criterion: Criterion | None = None,
) -> list[Any]:
    """The states after every part of the chain, or the last one alone, on all stages; differentiable once.

    All ranks of the axis call it with equal arguments. With several microbatches the tensors of state and inputs are
    cut along their common first dim; ones without dims go to all. With a `criterion` it is the sum of that over the
    microbatches, and each goes back as soon as it can (1F1B).
    """
    count, size = len(chain.parts), stages.axis.size
    if count < size:
        raise StrategyError(f"{count} parts cannot be spread over {size} stages; use at most {count} stages")
    if any(isinstance(module, nn.SyncBatchNorm) for module in chain.whole.modules()):
        raise StrategyError("SyncBatchNorm waits for all ranks, which on stages run other parts; use BatchNorm there")
    # What inference mode makes does not tell of writes, by which it is seen what parts have changed.
    with telling_others(), counting() if torch.is_inference_mode_enabled() else nullcontext():
        call = _Call(chain, stages, state, inputs, returns_all, criterion)
        return call.states() if criterion is None else [call.loss()]


class _Call:
    """One call, from its arguments to the gradients of its backward pass."""

    def __init__(
        self,
        chain: Chain,
        stages: Stages,
        state: Any,
        inputs: tuple[Any, ...],
        returns_all: bool,
        criterion: Criterion | None,
    ):
        self._chain, self._stages, self._axis = chain, stages, stages.axis
        axis = stages.axis
        self._is_first, self._is_last = axis.coordinate == 0, axis.coordinate == axis.size - 1
        self._returns_all, self._keeps = returns_all, torch.is_grad_enabled()
        given = inputs, () if criterion is None else criterion.targets
        self._given = Arguments(state, given, stages.microbatches, must_cut=self._keeps or chain.whole.training)
        self._part = stages.share(len(chain.parts))
        self._segment = Segment(chain, self._part, criterion if self._is_last else None)
        modules = [[chain.parts[n] for n in stages.share(len(chain.parts), stage)] for stage in range(axis.size)]
        whole = chain.whole
        if criterion is not None and isinstance(criterion.loss, nn.Module):
            whole = nn.ModuleDict({"chain": chain.whole, "criterion": criterion.loss})
            modules[-1].append(criterion.loss)
        self._parameters = [parameter for parameter in whole.parameters() if parameter.requires_grad]
        self._aliases = self._segment.lent() if self._keeps else {}
        self._graph = OwnGraph(axis.coordinate)
        self._graph.watch(self._aliases.values())
        modules = modules if are_real(axis) else [[] for _ in modules]  # in a simulation there are no numbers
        self._buffers = StageBuffers(whole, modules, axis.coordinate, self._given.microbatches)
        self._owners = [axis.size - 1]  # of the states that are returned
        if returns_all:
            self._owners = [stage for stage in range(axis.size) for _ in stages.share(len(chain.parts), stage)]
        self._returned: list[State] = []
        self._kept: dict[int, Kept] = {}  # by microbatch
        self._came: dict[int, tuple[State, list[Tensor]]] = {}  # by microbatch, before their turn
        self._sending: dict[int, list[InFlight]] = {}  # by microbatch, forward
        self._sending_back: list[InFlight] = []
        self._base = 0  # that the seeds of several microbatches are made of
        self._gradients: list[Tensor | None] = []  # of a loss

    def states(self) -> list[Any]:
        """The states that are returned, as the caller has them."""
        run: Any = _Pipelined.apply
        flat = list(run(self, *self._given.locals, *self._parameters) if self._keeps else self.forward())
        states = []
        for state in self._returned:
            own, flat = flat[: len(state.leaves)], flat[len(state.leaves) :]
            states.append(state.dressed(own, self._given.spatial))
        return states

    def loss(self) -> Tensor:
        """The criterion's sum over the microbatches, on all stages; it has gone back already."""
        run: Any = _PipelinedLoss.apply
        return run(self, *self._given.locals, *self._parameters) if self._keeps else self.forward_and_back()

    def forward(self) -> list[Tensor]:
        """All microbatches, then what is returned to all stages."""
        made: list[list[Any]] = []  # of each microbatch the states that are returned, or the last
        with self._own_random_states():
            for number in range(self._given.microbatches):
                with self._stages.around():
                    made.append(self._one_forward(number))
        return self._handed_out(made, self._settled(*made[0]))

    def forward_and_back(self) -> Tensor:
        """All microbatches forward and, as soon as they can, back; the sum of their losses."""
        order = with_coming(one_forward_one_backward(self._axis.coordinate, self._axis.size, self._given.microbatches))
        latest, total = 0, torch.zeros((), device=self._given.device)
        totals: dict[int, Tensor] = {}
        of_given: dict[int, list[Tensor | None]] = {}
        with self._own_random_states():
            for (kind, number), coming in order:
                with self._stages.around():
                    if kind == "forward":
                        latest, (made,) = number, self._one_forward(number)
                        total = total + made.detach() if self._is_last else total
                    elif self._keeps:
                        losses = self._kept[number].states if self._is_last else []
                        seeds: Any = [list(map(torch.ones_like, each)) for each in losses]
                        if number < latest:
                            self._buffers.hide_attributes()
                        of_given[number] = self._one_backward(number, seeds, totals, coming)
        self._buffers.put_back_attributes()
        everyone = self._settled(total)
        if self._keeps:
            self._wait()
            self._gradients = self._of_arguments([of_given[number] for number in sorted(of_given)], totals)
        (loss,) = from_one(self._axis, self._axis.size - 1, [total], everyone[-1].states[0].forms, self._given.device)
        return loss

    @contextmanager
    def _own_random_states(self) -> Iterator[None]:
        """Inside, the random states are those of the microbatches, where there are several."""
        if self._given.microbatches == 1 or not are_real(self._axis):
            yield
            return
        self._base = objects_of_all(self._axis, self._stages.draw_seed(None))[0]
        with kept_random_state():
            yield

    def _settled(self, *states: Any) -> list[StageSaid]:
        """What all stages say after their forward passes; buffers and random states become one process's."""
        self._wait()
        left = random_state() if self._is_last and self._given.microbatches == 1 else None
        said = StageSaid(tuple(map(State.of, states)), self._buffers.said(), left)
        everyone = objects_of_all(self._axis, said)
        if everyone[-1].random is not None:
            set_random_state(everyone[-1].random)
        self._buffers.settle([said.buffers for said in everyone])
        return everyone

    def _one_forward(self, number: int) -> list[Any]:
        """One microbatch through this stage; the states that are returned, or the last."""
        parts = self._given.microbatch(number)
        form, locals_ = self._given.form(parts), [local_or_whole(part) for part in parts]
        own, inputs = locals_[: self._given.of_state], locals_[self._given.of_state :]
        if not self._is_first:
            form, own = self._came.pop(number) if number in self._came else self._received()

        def before(part: int) -> None:
            if self._given.microbatches > 1:  # in one process, too, they come after each other in this order alone
                seed_everything(mixed_seed(self._base, number, part))

        with self._buffers.around(), torch.set_grad_enabled(self._keeps):
            begun = Begun(own, inputs, self._keeps, came=not self._is_first)
            self._graph.watch(begun.leaves if self._keeps else ())
            args = form.dressed(begun.state, self._given.spatial), *self._given.inputs(parts, begun.inputs), before
            with lent(self._segment, self._aliases):
                states = self._segment(*args)
        begun.require_as_given(self._axis.coordinate, self._returns_all)
        states = list(states) if self._returns_all else [states[-1]]
        if self._keeps:
            kept = [[local_or_whole(leaf) for leaf in tree_flatten(each)[0]] for each in states]
            self._kept[number] = Kept(begun.leaves[: len(own)], begun.leaves[len(own) :], kept)
            if number == 0:
                require_known(kept, [*self._aliases.values(), *begun.leaves], self._axis.coordinate)
        if not self._is_last:
            self._sending[number] = self._sent(states[-1])
        return states

    def _sent(self, state: Any) -> list[InFlight]:
        """The state to the next stage, with what this one leaves behind."""
        peer, facts = self._axis.coordinate + 1, State.of(state)
        left = self._buffers.left(), random_state() if self._given.microbatches == 1 else None
        sent = [send_object(self._axis, peer, (facts, left), "a state's form")] if are_real(self._axis) else []
        tensors = [local_or_whole(leaf) for leaf in tree_flatten(state)[0]]
        return [*sent, send(self._axis, peer, tensors, "state")]

    def _received(self) -> tuple[State, list[Tensor]]:
        """The state from the stage before."""
        peer = self._axis.coordinate - 1
        if are_real(self._axis):
            like, left = receive_object(self._axis, peer, "a state's form")
            self._buffers.take(left[0])
            if left[1] is not None:
                set_random_state(left[1])
        else:
            like = self._likeness(self._part.start)
        return like, receive(self._axis, peer, like.forms, "state", self._given.device)

    def _likeness(self, count: int) -> State:
        """In a simulation the form of a microbatch's state after so many parts."""
        return State.of(self._chain.likeness(count, self._given.state(self._given.microbatch(0))))

    def _handed_out(self, made: list[list[Any]], everyone: Sequence[StageSaid]) -> list[Tensor]:
        """The returned states of the whole batch, on all stages."""
        flat: list[Tensor] = []
        for number, owner in enumerate(self._owners):
            nth = number - self._owners.index(owner)
            state = everyone[owner].states[nth]
            if not are_real(self._axis) and owner != self._axis.coordinate:
                state = self._likeness(number + 1 if self._returns_all else len(self._chain.parts))
            state = State(state.tree, tuple(leaf.times(self._given.microbatches) for leaf in state.leaves))
            own: list[Tensor] = []
            if owner == self._axis.coordinate:
                leaves = zip(*(tree_flatten(states[nth])[0] for states in made), strict=True)
                own = [_in_one([local_or_whole(leaf).detach() for leaf in each]) for each in leaves]
            flat += from_one(self._axis, owner, own, state.forms, self._given.device)
            self._returned.append(state)
        return flat

    def backward(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """All microbatches back through this stage; the gradients of state, inputs and parameters."""
        if not self._kept:
            raise GradientError("backward goes through the stages of a call a second time; their graphs are freed")
        of_states = self._of_own_states(gradients)
        totals: dict[int, Tensor] = {}  # of the aliases, by identity
        of_given = []
        for number in range(self._given.microbatches):
            with self._stages.around():
                of_given.append(self._one_backward(number, of_states, totals))
        self._wait()
        return self._of_arguments(of_given, totals)

    def scaled(self, gradient: Tensor) -> list[Tensor | None]:
        """What the loss's backward pass has found, as many times as its gradient says, which each stage has."""
        if not self._gradients:
            raise GradientError("backward goes through the stages of a call a second time; their graphs are freed")
        found, self._gradients = self._gradients, []
        factor = all_sum_no_grad(gradient, self._axis.group) / self._axis.size
        return [each if each is None else each.mul_(factor.to(each.dtype)) for each in found]

    def _of_own_states(self, gradients: Sequence[Tensor | None]) -> list[list[Tensor | None]]:
        """The gradients of this stage's returned states: the mean over all stages, each of which has the loss.

        It is one process's, and so is what hooks and functions of the parts get on the way back.
        """
        there = flags_of_any(self._axis, [gradient is not None for gradient in gradients])
        own: list[list[Tensor | None]] = []
        position = 0
        for owner, state in zip(self._owners, self._returned, strict=True):
            numbers = [n for n in range(position, position + len(state.leaves)) if there[n]]
            forms = {n: state.forms[n - position] for n in numbers}
            mine = [forms[n].empty(self._given.device).zero_() if (g := gradients[n]) is None else g for n in numbers]
            totals = dict(zip(numbers, summed_at(self._axis, owner, mine), strict=True))
            if owner == self._axis.coordinate:
                means = {n: total / self._axis.size for n, total in totals.items()}
                own.append([means.get(n) for n in range(position, position + len(state.leaves))])
            position += len(state.leaves)
        return own

    def _wait(self) -> None:
        """Until all that was sent has been received."""
        for flights in (*self._sending.values(), self._sending_back):
            for flight in flights:
                flight.wait()
        self._sending.clear()
        self._sending_back.clear()

    def _one_backward(
        self, number: int, of_states: list[list[Tensor | None]], totals: dict[int, Tensor], coming: Sequence[int] = ()
    ) -> list[Tensor | None]:
        """One microbatch; the gradients of its part of state and inputs, those of parameters into `totals`."""
        kept = self._kept.pop(number)
        outs, seeds = kept.seeded(of_states, number, self._given.microbatches)
        if not self._is_last:
            sent = [tensor for tensor in kept.states[-1] if has_gradients(tensor)]
            forms = [Form.of(tensor) for tensor in sent]
            came = receive_some(self._axis, self._axis.coordinate + 1, forms, "gradient of a state", self._given.device)
            for flight in self._sending.pop(number, ()):  # the other stage has long read it
                flight.wait()
            for tensor, gradient in zip(sent, came, strict=True):
                if gradient is not None and tensor.requires_grad:
                    outs.append(tensor)
                    seeds.append(gradient)
        aliases = [alias for alias in self._aliases.values() if alias.requires_grad]
        given = [*kept.given, *kept.inputs]
        wanted = [tensor for tensor in (*given, *aliases) if tensor.requires_grad]
        flowed: Sequence[Tensor | None] = [None] * len(wanted)
        if outs and wanted:
            with self._graph.going_back():
                flowed = torch.autograd.grad(outs, wanted, seeds, allow_unused=True)
        by_tensor = {id(tensor): gradient for tensor, gradient in zip(wanted, flowed, strict=True)}
        for alias in aliases:
            part, before = by_tensor[id(alias)], totals.get(id(alias))
            if part is not None:
                totals[id(alias)] = part if before is None else before + part
        if not self._is_first:
            back = [by_tensor.get(id(tensor)) for tensor in kept.given if has_gradients(tensor)]
            self._came.update((other, self._received()) for other in coming)  # the stage before sends it first, too
            for flight in self._sending_back:  # the one before, which the other stage waits for before this one
                flight.wait()
            self._sending_back = send_some(self._axis, self._axis.coordinate - 1, back, "gradient of a state")
        of_state = kept.given if self._is_first else [torch.empty(0)] * self._given.of_state
        return [by_tensor.get(id(tensor)) for tensor in (*of_state, *kept.inputs)]

    def _of_arguments(self, of_given: list[list[Tensor | None]], totals: dict[int, Tensor]) -> list[Tensor | None]:
        """The gradients as autograd wants them: of state and inputs one process's, of parameters this stage's part.

        That of parameters is as many times too large as there are stages, for their gradient is the mean over ranks.
        """
        arguments = self._given.joined(of_given)
        position = {id(parameter): number for number, parameter in enumerate(self._parameters)}
        own: list[Tensor | None] = [None] * len(self._parameters)
        for name, parameter in self._segment.named_parameters():
            if id(parameter) in position:
                part = totals.pop(id(self._aliases[name]), None)
                own[position[id(parameter)]] = None if part is None else part * self._axis.size
        wanted = [tensor.requires_grad for tensor in (*self._given.locals, *self._parameters)]
        there = flags_of_any(self._axis, [gradient is not None for gradient in (*arguments, *own)], wanted)
        for number, local in enumerate(self._given.locals):
            if there[number]:
                mine = arguments[number]
                mine = torch.zeros_like(local) if mine is None else mine
                arguments[number] = all_sum_no_grad(mine, self._axis.group)
        for number, parameter in enumerate(self._parameters):
            if there[len(arguments) + number] and own[number] is None:
                own[number] = torch.zeros_like(parameter)
        return [*arguments, *own]


class _Pipelined(torch.autograd.Function):
    """The call as one node of the graph."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *tensors: Tensor) -> Any:
        ctx.call = call
        ctx.set_materialize_grads(False)
        results = call.forward()
        ctx.mark_non_differentiable(*(result for result in results if not has_gradients(result)))
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        with telling_others():
            require_first(*_WITHOUT_SECOND)
            return None, *ctx.call.backward(gradients)


class _PipelinedLoss(torch.autograd.Function):
    """The loss of a call, which has gone back when it is there; its gradient is as many times that of one."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *tensors: Tensor) -> Any:
        ctx.call = call
        return call.forward_and_back()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        with telling_others():
            require_first(*_WITHOUT_SECOND)
            return None, *ctx.call.scaled(gradient)


def _in_one(pieces: list[Tensor]) -> Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

"""Whether the ranks of a replica still run one program, looked at around a model's forward and backward pass.

Between two exchanges of a model's ops a rank can wait where no message of ours comes by, in DDP's averages say. So all
ranks meet at the start of backward, and what they have drawn from random states is compared after forward.
"""

import warnings
from collections.abc import Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fullframe.errors import DivergenceError
from fullframe.model.same.operands import OperandsInPasses
from fullframe.model.same.optimizers import Stepped
from fullframe.model.same.weights import Weights, WeightsInTurn
from fullframe.ranks.adjoint import refuse_transforms
from fullframe.ranks.agreement import from_all_ranks
from fullframe.ranks.channel import compare_records
from fullframe.ranks.collectives import all_gather_no_grad
from fullframe.ranks.mesh import Spatial
from fullframe.ranks.random_states import NAMES, digests
from fullframe.ranks.tags import HEAD_BYTES, line, padded
from fullframe.spatial.rules.gradient_hooks import when_gradient_arrives


class Agreement:
    """The checks of one model on one mesh; none where a replica is one rank, or ranks are not real."""

    def __init__(self, spatial: Spatial | None):
        self._spatial = spatial if spatial is not None and spatial.size > 1 and spatial.channel.tagged else None
        self._weights = WeightsInTurn(self._spatial)
        self._operands = OperandsInPasses(self._spatial)
        self._before: tuple[int, ...] = ()
        self._last = () if self._spatial is None else digests()  # after the forward pass before
        self._is_said = False
        self._looks = False  # at this forward pass
        self._backward = -1  # the last backward pass in which the ranks met
        self._held: tuple[Any, nn.Module | None] = None, None  # weights and model of a pass that is compared later

    def __reduce__(self) -> tuple[Any, ...]:
        """Nothing of the mesh: a copy of the model, or a saved one, is not on it."""
        return Agreement, (None,)

    def before_forward(self, is_split: bool, rebuilds: bool = False) -> None:
        """Remember the random states. A pass in which nothing `is_split` may well be one rank's own, and is let be.

        Where DDP `rebuilds` its buckets in it, for which it waits for all ranks without a word, they meet before.
        Raises UnsupportedOp under transforms of `torch.func`, in which random states cannot be read either.
        """
        self._looks = is_split and self._spatial is not None
        if self._looks:
            refuse_transforms()
            self._before = digests()
            self._operands.forward_begins()
        if self._looks and rebuilds and self._spatial is not None:
            self._spatial.channel.agree("forward", torch.empty(()))

    def after_forward(
        self,
        results: Sequence[Any],
        trained: Collection[nn.Parameter] = (),
        model: nn.Module | None = None,
        stepped: Stepped | None = None,
    ) -> None:
        """Raise DivergenceError on all ranks if they drew random numbers from different states.

        Likewise where they hold other values of `trained`, the parameters of `model` that are, or a model in another
        state, or its optimizers, which have `stepped`, set otherwise.

        A state that differs and was not drawn from does no harm. What all have drawn since the last forward pass, of
        which it is not known what for, is a warning, once. The ranks meet when the first of `results` gets its
        gradient.
        """
        if self._spatial is None or not self._looks:
            return
        self._compare(self._spatial, self._weights.look(trained, model, stepped), model)
        self._operands.forward_has_ended()
        for result in results:
            if isinstance(result, Tensor) and result.requires_grad:
                when_gradient_arrives(result, self._gradient_arrived)

    def _compare(self, spatial: Spatial, weights: Weights, model: nn.Module | None) -> None:
        after = digests()
        drawn = [int(a != b) for a, b in zip(self._before, after, strict=True)]
        if spatial.channel.record is not None:
            said = [
                f"{name} {state & 0xFFFFFFFF:08x}"
                for name, state, used in zip(NAMES, after, drawn, strict=True)
                if used
            ]
            drew = f"drew from {', '.join(said) or 'no random state'}"
            state = f"{weights.digest ^ weights.state:08x}"
            text = f"the end of a forward pass that {drew}, of a model in state {state}, at {line()}"
            spatial.channel.record.note(padded(text, HEAD_BYTES))
            self._held = weights, model
            return
        drawn_before = [int(a != b) for a, b in zip(self._last, self._before, strict=True)]
        own = [after, drawn, self._before, drawn_before, weights]
        facts = torch.tensor(own, device=spatial.mesh.device_type)
        self._last = after
        everyone = all_gather_no_grad(facts, spatial.replica, "random states").unbind(1)
        states, used, states_before, used_before, held = everyone
        if (held != held[0]).any():
            of_ranks = zip(spatial.replica_ranks, held.tolist(), strict=True)
            self._weights.require_same({rank: Weights(*said) for rank, said in of_ranks}, model, spatial.replica)
        doubtful = (states_before != states_before[0]).any(0) & used_before.all(0)
        if names := _names(doubtful):
            self._warn(names, spatial)
        if names := _names((states != states[0]).any(0) & used.any(0)):
            raise DivergenceError(
                f"the forward pass at {line()} drew random numbers from {names}, whose state differs over ranks "
                f"{list(spatial.replica_ranks)} of one replica, so they dropped, mixed or sized differently; after "
                "parallelize, which shares the states, seed all ranks of a replica alike "
                "(torch.manual_seed(seed + mesh.get_local_rank('data'))), and draw nothing on one rank alone"
            )

    def _warn(self, names: str, spatial: Spatial) -> None:
        if self._is_said or dist.get_rank() != spatial.replica_ranks[0]:
            return
        self._is_said = True
        warnings.warn(
            f"before the forward pass at {line()} random numbers were drawn from {names}, whose state differs over "
            f"ranks {list(spatial.replica_ranks)} of one replica: a crop, a mix or a permutation of split images that "
            "follows from them is another on each rank, and wrong; after parallelize seed all ranks of a replica alike "
            "(torch.manual_seed(seed + mesh.get_local_rank('data'))), and draw nothing on one rank alone",
            stacklevel=4,
        )

    def _gradient_arrived(self, gradient: Tensor) -> None:
        backward = torch._C._current_graph_task_id()
        if self._spatial is None or backward == self._backward:
            return
        self._backward = backward
        self._spatial.channel.agree("backward", torch.empty(()))
        self._operands.backward_begins()
        if self._spatial.channel.record is not None:
            torch.autograd.Variable._execution_engine.queue_callback(self._compare_record)

    def _compare_record(self) -> None:
        if self._spatial is None or self._spatial.channel.record is None:
            return
        (weights, model), self._held = self._held, (None, None)
        try:
            compare_records(self._spatial.channels, self._spatial.replica)
        except DivergenceError:  # on all ranks, which then say more where it is the model
            held = dict(zip(self._spatial.replica_ranks, from_all_ranks(weights, self._spatial.replica), strict=True))
            if None not in held.values():
                self._weights.require_same(held, model, self._spatial.replica)
            raise


def _names(chosen: Tensor) -> str:
    return ", ".join(name for name, is_chosen in zip(NAMES, chosen.tolist(), strict=True) if is_chosen)

"""The probes of one rank: hooks on torch's backward, optimizers, modules, loaders and scalers.

They note and send nothing, so that a probe can neither hang a rank nor mend what it looks for.
"""

import gc
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from fullframe.doctor.probes.clock import seconds
from fullframe.doctor.probes.loading import Loading
from fullframe.doctor.probes.modules import Modules, wrapper_of
from fullframe.doctor.probes.notes import Backward, Event, Job, Oddity, Scaling, Sketch, Untrained, Update, Weights
from fullframe.doctor.probes.scaling import ScalerProbe
from fullframe.doctor.probes.sketches import LiveGraphs, checksum, graph, local, part_of, sketch
from fullframe.simulation.fake.replaced import replaced
from fullframe.wording import plural, some

_FRAMEWORKS = ("lightning_fabric", "lightning", "accelerate", "deepspeed", "horovod")

_PASSES = 16  # of backward a step, at most, until it is given up


class Enough(SystemExit):
    """The probes have seen as many steps as they were asked for."""

    def __init__(self) -> None:
        super().__init__(0)


class Probes:
    """Watches what this process trains, from `attached` on.

    `note` gets the events. After `steps` steps of an optimizer the next backward raises `Enough`; None: never.
    """

    def __init__(self, note: Callable[[Event], None], *, rank: int, started: int, steps: int | None = None):
        self._note, self._rank, self._started, self._steps = note, rank, started, steps
        self.replica: Callable[[], int] = lambda: self._rank if not dist.is_initialized() else dist.get_rank()
        self._seen_oddities: set[tuple[str, str]] = set()
        self.modules = Modules(self._oddity)
        self._loading = Loading(note)
        self._scaling = ScalerProbe(self._scaled)
        self._scaled_losses = 0  # of which no backward pass has begun yet
        self._has_scaled = False  # the last backward pass: its gradients
        self._graphs = LiveGraphs()
        self._optimizers: dict[int, Optimizer] = {}  # kept, so that an id stays one's own
        self._updates: dict[int, int] = {}  # by number of the optimizer
        self._uncleared: dict[int, dict[str, Tensor]] = {}  # by number of the optimizer: gradients it has used
        self._backwards = 0
        self._pending: dict[int, Update] = {}  # steps that are taken inside backward, a parameter at a time
        self._before: dict[str, int] = {}
        self._said_untrained = False
        self._clock, self._own_seconds = seconds(), 0.0
        self._names: dict[int, str] = {}
        self._frozen: dict[str, Sketch] = {}  # before the first update

    @property
    def updates(self) -> int:
        """Steps of the busiest optimizer."""
        return max(self._updates.values(), default=0)

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Inside, everything is watched."""
        with ExitStack() as stack:
            stack.callback(self.modules.ended)
            stack.enter_context(self._loading.attached())
            stack.enter_context(self._scaling.attached())
            for handle in (
                *self.modules.attach(),
                register_optimizer_step_pre_hook(self._before_step),
                register_optimizer_step_post_hook(self._after_step),
            ):
                stack.callback(handle.remove)
            original: Callable[..., Any] = torch.autograd.backward
            stack.enter_context(replaced(torch.autograd, "backward", self._watched(original)))
            stack.enter_context(replaced(torch.autograd, "grad", self._using(torch.autograd.grad)))
            yield

    def _oddity(self, kind: str, text: str, where: str) -> None:
        if (kind, where) not in self._seen_oddities:
            self._seen_oddities.add((kind, where))
            self._note(Oddity(kind=kind, text=text, where=where))

    def _scaled(self, action: str, scale: float, optimizer: Any) -> None:
        if optimizer is not None:
            self._number(optimizer)  # its parameters are trained, also before its first step
        if action in ("scale", "update"):  # several may have gone into one pass
            self._scaled_losses = self._scaled_losses + 1 if action == "scale" else 0
        self._note(Scaling(action=action, scale=scale, at_update=sum(self._updates.values())))

    def _number(self, optimizer: Any) -> int:
        inner = getattr(optimizer, "optimizer", optimizer)  # as Fabric and Accelerate wrap it
        self._optimizers.setdefault(id(inner), inner)
        return list(self._optimizers).index(id(inner))

    def _watched(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            if self.modules.in_backward:  # a checkpoint's own
                return original(tensors, *args, **kwargs)
            if self._steps is not None and (self.updates >= self._steps or self._backwards >= _PASSES * self._steps):
                self.modules.used()
                raise Enough
            tensors = tensors if isinstance(tensors, (Tensor, tuple)) else tuple(tensors)  # an iterator gives them once
            with self._aside():
                event = self._begun(tensors)
            self.modules.in_backward = True
            try:
                return original(tensors, *args, **kwargs)
            finally:
                self.modules.in_backward = False
                self.modules.used()
                self._note(Backward(**event, modules=self.modules.counted_again()))
                self._finish_pending()

        return backward

    def _using(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def grad(*args: Any, **kwargs: Any) -> Any:
            try:
                return original(*args, **kwargs)
            finally:
                self.modules.used()

        return grad

    def _begun(self, tensors: Any) -> dict[str, Any]:
        """What can be said of a backward pass before it runs."""
        if not self._backwards:
            self._note_job()
        self._backwards += 1
        self._has_scaled, self._scaled_losses = self._scaled_losses > 0, max(self._scaled_losses - 1, 0)
        losses = [tensors] if isinstance(tensors, Tensor) else [t for t in tensors if isinstance(t, Tensor)]
        for held in self._uncleared.values():
            for name in [n for n, p in held.items() if not _has_gradient(p)]:
                del held[name]
        value = next((float(local(loss)) for loss in losses if loss.numel() == 1), 0.0)
        nodes = list(graph(*(loss.grad_fn for loss in losses)))
        return {
            "loss": value,
            "attached": any(loss.requires_grad for loss in losses),
            "nodes": len(nodes),
            "adds": any(_has_gradient(node.variable) for node in nodes if type(node).__name__ == "AccumulateGrad"),
            "synchronizes": self.modules.synchronizes(),
            "evaluating": self.modules.evaluating(),
            "scaled": self._has_scaled,
        }

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        number = self._number(optimizer)
        if not self._updates:
            self._note_weights()
        self._updates.setdefault(number, 0)
        if self._has_scaled and not self._scaling.stepping:
            self._scaled("bare", 0.0, optimizer)
        self._names = self._all_names()
        with self._aside():
            self._before = {name: checksum(p) for name, p in self._parameters(optimizer).items()}

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        with self._aside():
            event = self._update(optimizer)
        if self.modules.in_backward:
            self._join(event)
            return
        self._finish(event)

    def _update(self, optimizer: Optimizer) -> Update:
        number, held = self._number(optimizer), self._parameters(optimizer)
        gradients = {name: sketch(p.grad) for name, p in held.items() if p.grad is not None}
        parameters = {name: sketch(parameter) for name, parameter in held.items()}
        still = [name for name, found in parameters.items() if found.checksum == self._before.get(name)]
        stale = tuple(name for name in self._uncleared.get(number, ()) if name in held)
        self._uncleared[number] = {n: p for n, p in held.items() if p.grad is not None and gradients[n].norm > 0}
        return Update(
            number=self._updates[number] + 1,
            optimizer=number,
            gradients=gradients,
            missing=tuple(name for name, p in held.items() if p.requires_grad and p.grad is None),
            parameters=parameters,
            unchanged=tuple(name for name in still if name in gradients and gradients[name].norm > 0),
            rates=tuple(float(group["lr"]) for group in optimizer.param_groups if "lr" in group),
            stale=stale,
        )

    def _join(self, event: Update) -> None:
        """Updates that are taken in backward, a parameter at a time, are one."""
        before = self._pending.get(event.optimizer, event)
        self._pending[event.optimizer] = Update(
            number=event.number,
            optimizer=event.optimizer,
            gradients={**before.gradients, **event.gradients},
            parameters={**before.parameters, **event.parameters},
            unchanged=tuple(dict.fromkeys((*before.unchanged, *event.unchanged))),
            rates=event.rates,
        )

    def _finish_pending(self) -> None:
        for event in self._pending.values():
            self._finish(event)
        self._pending.clear()

    def _finish(self, event: Update) -> None:
        self._updates[event.optimizer] = event.number
        took = seconds() - self._clock - self._own_seconds
        alive, holder = self._graphs.count()
        self._note(replace(event, alive=alive, held_by=holder, seconds=took))
        if event.number == 2 and not self._said_untrained:
            self._said_untrained = True
            held = {id(p) for optimizer in _optimizers() for group in optimizer.param_groups for p in group["params"]}
            held |= self.modules.trained  # also by those that `gc.freeze` has hidden
            every = {name: p for name, p in self.modules.named_parameters() if id(p) not in held}
            self._note(Untrained(names=tuple(name for name, p in every.items() if p.grad is not None)))
            self._note_frozen_norms()
        self._clock, self._own_seconds = seconds(), 0.0

    def _note_frozen_norms(self) -> None:
        """Of a part in which nothing else moves; what moves a momentum encoder without gradients moves its weights."""
        norms, still = self.modules.frozen_norms(), dict(self.modules.named_parameters())
        if norms and all(sketch(still[name]) == before for name, before in self._frozen.items() if name in still):
            self._oddity("statistics of a frozen part", plural(len(norms), "batch norm"), some(norms))

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """What runs inside is the probes' own, and no part of a step's time."""
        started = seconds()
        try:
            yield
        finally:
            self._own_seconds += seconds() - started

    def _all_names(self) -> dict[int, str]:
        self.modules.trained = {id(p) for o in self._optimizers.values() for g in o.param_groups for p in g["params"]}
        return {id(parameter): name for name, parameter in self.modules.named_parameters()}

    def _parameters(self, optimizer: Optimizer) -> dict[str, Tensor]:
        found: list[Tensor] = [p for group in optimizer.param_groups for p in group["params"]]
        number = self._number(optimizer)
        return {self._names.get(id(p), f"optimizer{number}[{n}]{part_of(p)}"): p for n, p in enumerate(found)}

    def _note_job(self) -> None:
        """What kind of job this is, once the model was called."""
        roots, met = self.modules.roots(), dist.is_initialized()
        parallel = [root for root in roots if isinstance(root, DistributedDataParallel)]
        wrappers = {wrapper_of(root) for root in roots} - {""}
        known = [name for name in _FRAMEWORKS if name in sys.modules]
        every = dict(self.modules.named_parameters())
        device = next((local(p).device for p in every.values()), torch.device("cpu"))
        self._note(
            Job(
                ranks=dist.get_world_size() if met else 1,
                started=self._started,
                replica=self.replica(),
                host=socket.gethostname(),
                torch=torch.__version__,
                backend=_backend() if met else "",
                device=str(device),
                device_id=_device_id(device),
                frameworks=(*sorted(wrappers), *known),
                unused_are_sought=any(root.find_unused_parameters for root in parallel),
                unsynchronized=self.modules.unwrapped_classes(),
            )
        )

    def _note_weights(self) -> None:
        """The model before the first update."""
        names, every = self._all_names(), dict(self.modules.named_parameters())
        held = [p for o in self._optimizers.values() for g in o.param_groups for p in g["params"]]
        parameters = {name: sketch(parameter) for name, parameter in every.items()}
        self._frozen = {name: parameters[name] for name, p in every.items() if not p.requires_grad}
        self._note(
            Weights(
                parameters=parameters,
                frozen=tuple(self._frozen),
                frozen_in_optimizer=tuple(name for name in self._frozen if id(every[name]) in self.modules.trained),
                unknown_to_model=sum(id(p) not in names for p in held),
                elements=sum(p.numel() for p in every.values()),
            )
        )


def _has_gradient(parameter: Tensor) -> bool:
    """Whether there is one, and not of zeros alone, as `zero_grad(set_to_none=False)` leaves them."""
    return parameter.grad is not None and bool(local(parameter.grad).any())


def _optimizers() -> list[Any]:
    """All that there are: some step less often than others, as a generator's after five steps of its critic's."""
    return [each for each in gc.get_objects() if issubclass(type(each), Optimizer)]


def _backend() -> str:
    config: Callable[[], Any] = dist.get_backend_config
    return str(config())


def _device_id(device: torch.device) -> str:
    if device.type == "cpu":
        return ""
    module: Any = torch.get_device_module(device)
    return str(getattr(module.get_device_properties(device), "uuid", device))

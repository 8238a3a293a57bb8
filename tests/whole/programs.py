"""One case in plain torch and on split tensors, on one rank: what came out, and whether the two agree."""

import warnings
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

import fullframe as ff
from fullframe.spatial.spec import spec_of
from fullframe.spatial.tensor import SpatialTensor, wrap
from tests.whole.cases import Case, Mesh, can_split, chosen, planted
from tests.whole.database import DRAWN_BY_SHARDS, UNSET, Entry, Sample, own_copy, seeded

FLOAT64 = 1e-9  # relative to the largest value of the tensor
ULPS = 8  # of a narrower dtype, also relative to the largest value; or twice plain torch's own error
FLOOR = 1e-6  # what is smaller all over has no relative error
# A narrow dtype's gradients are of terms of order 1 that may cancel: their rounding is what is left.
FLOORS = {"tensors": FLOOR, "gradients": 1.0}
# float32 gets four times as many: sums over some hundred elements that cancel lose as much in another order.
EPSILON = {torch.float64: FLOAT64 / ULPS, torch.complex128: FLOAT64 / ULPS, torch.float32: 4.8e-7}


class NotApplicable(Exception):
    """The case has nothing to ask: no result to write into, nothing that could be split."""


@dataclass
class Answers:
    """What a program left behind. Labels name the tensors: "output 0", "argument 1 after the call", ..."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)  # requires_grad, types, plain numbers
    whole: list[Tensor] = field(default_factory=list)  # results that every rank has, which must be equal to the bit
    no_backward: str = ""  # why plain torch has no gradient here


@dataclass
class Program:
    """A case with its arguments; `run` may be called again and again."""

    entry: Entry
    case: Case
    sample: Sample
    mesh: Mesh

    def __post_init__(self) -> None:
        leaves, self.spec = tree_flatten((self.sample.args, self.sample.kwargs))
        which = iter(chosen(self.sample, self.case.split, self.mesh))
        self.split = [next(which) if isinstance(leaf, Tensor) else False for leaf in leaves]
        if self.case.values == "planted":
            # Not into weights: by an infinite one every formula that groups terms otherwise gives other NaN.
            leaves = [self._planted(leaf) if split else leaf for leaf, split in zip(leaves, self.split, strict=True)]
        self.leaves = leaves
        self.wants_graph = not self.case.call.startswith(("out", "write"))

    def run(self, on: DeviceMesh | None, seed: int = 0, gradients: bool = True) -> Answers:
        """Call the op on copies of the arguments; on a mesh, those chosen are split. Collective on a mesh."""
        seeded(seed)
        leaves = [self._leaf(leaf) for leaf in self.leaves]
        operands = [self._operand(leaf, split, on) for leaf, split in zip(leaves, self.split, strict=True)]
        module = own_copy(self.sample)
        args, kwargs = tree_unflatten(operands, self.spec)
        answers = Answers()
        call = self.entry.calls.get(self.case.call, self.entry.calls["function"])
        if module is not None:
            result = call(module, *args, **kwargs)
        elif self.case.call.startswith("out"):
            out = self._out(on)
            result = call(*args, **kwargs, out=out)
            _keep(answers, "out", tree_leaves(out))
            answers.facts["returns out"] = _same(result, out)
        else:
            result = call(*args, **kwargs)
        if self.case.call.startswith("write"):
            _write(args[0] if self.case.call == "write argument" else result)
        outputs = tree_leaves(result)
        if "in-place" in self.case.call:
            answers.facts["returns its argument"] = result is args[0]
        answers.facts["kinds"] = [_kind(value) for value in (result, *outputs)][: None if len(outputs) > 1 else 1]
        wholes = _keep(answers, "output", outputs)
        _keep(answers, "argument after the call", operands)
        if module is not None:
            _keep(answers, "buffer", list(module.buffers()))
        if gradients and self.wants_graph:
            _backward(answers, wholes, leaves, module, strict=on is not None)
        return answers

    def _planted(self, leaf: Tensor) -> Tensor:
        return planted(leaf, self.entry, self.case).requires_grad_(leaf.requires_grad)

    def _leaf(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        graph = leaf.requires_grad and self.wants_graph
        return leaf.detach().clone().requires_grad_(graph)

    def _operand(self, leaf: Any, split: bool, on: DeviceMesh | None) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if on is None or not split:
            return leaf.clone()
        return self._shard(leaf, on)

    def _shard(self, tensor: Tensor, on: DeviceMesh) -> Tensor:
        shell = ff.shard(tensor, on, check=False)
        if not self.case.gather:
            return shell
        spec = shell.spec
        return wrap(shell._local, spec_of(spec.spatial, spec.shape, spec.placements, True, None))

    def _out(self, on: DeviceMesh | None) -> Any:
        """What `out=` gets: tensors of the result's shapes that hold something else."""
        args, kwargs = tree_unflatten([self._operand(self._leaf(x), False, None) for x in self.leaves], self.spec)
        with torch.no_grad():
            expected = self.entry.calls["function"](*args, **kwargs)
        tensors = [t for t in tree_leaves(expected) if isinstance(t, Tensor)]
        as_split = self.case.call == "out split"
        if not tensors or (as_split and not any(can_split(t, self.mesh) for t in tensors)):
            raise NotApplicable

        def made(like: Tensor) -> Tensor:
            out = torch.full(like.shape, 1, dtype=like.dtype)
            return self._shard(out, on) if on is not None and as_split and can_split(out, self.mesh) else out

        return made(expected) if isinstance(expected, Tensor) else type_of_out(expected)(map(made, expected))


def type_of_out(result: Any) -> type:
    """Several results go into a tuple, a list of results into a list."""
    return list if isinstance(result, list) else tuple


def _same(result: Any, out: Any) -> bool:
    results, outs = tree_leaves(result), tree_leaves(out)
    return len(results) == len(outs) and all(a is b for a, b in zip(results, outs, strict=True))


def _kind(value: Any) -> Any:
    if isinstance(value, Tensor):
        return "Tensor"
    if isinstance(value, tuple):
        return type(value).__name__
    return type(value).__name__ if isinstance(value, (list, dict)) or value is None else repr(value)


def _write(tree: Any) -> None:
    """Write into tensors in place, to see what else changes."""
    tensors = [t for t in tree_leaves(tree) if isinstance(t, Tensor)]
    if not tensors:
        raise NotApplicable
    with torch.no_grad():
        for number, tensor in enumerate(tensors[:4]):
            tensor.fill_(number % 2 if tensor.dtype == torch.bool else number + 2)


def _keep(answers: Answers, label: str, values: list[Any]) -> list[Any]:
    """Note tensors as whole ones; returns them."""
    wholes = [_dense(value.full() if isinstance(value, SpatialTensor) else value) for value in values]
    for n, (value, whole) in enumerate(zip(values, wholes, strict=True)):
        if not isinstance(value, Tensor):
            continue
        answers.tensors[f"{label} {n}"] = whole.detach().clone()
        answers.facts[f"shape of {label} {n}"] = tuple(value.shape)
        if label == "output":
            answers.facts[f"requires_grad of {label} {n}"] = value.requires_grad
            answers.facts[f"dtype of {label} {n}"] = value.dtype
            if not isinstance(value, SpatialTensor) or not value.placements:
                answers.whole.append(whole.detach())
    return wholes


def _dense(value: Any) -> Any:
    return value.to_dense() if isinstance(value, Tensor) and value.layout != torch.strided else value


def _backward(answers: Answers, outputs: list[Any], leaves: list[Any], module: nn.Module | None, strict: bool) -> None:
    """Gradients of an uneven sum of all outputs. Plain torch's refusal is noted, a split program's is raised."""
    try:
        terms = [_uneven_sum(t) for t in outputs if isinstance(t, Tensor) and t.requires_grad and t.numel()]
        if terms:
            torch.stack([term.to(torch.float64) for term in terms]).sum().backward()
    except Exception as error:
        if strict:
            raise
        answers.no_backward = f"{type(error).__name__}: {error}"
        return
    named = {f"gradient of argument {n}": leaf for n, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
    named |= {f"gradient of {name}": p for name, p in (module.named_parameters() if module is not None else ())}
    answers.gradients = {name: t.grad for name, t in named.items() if t.grad is not None and t.numel()}
    answers.facts["leaves with a gradient"] = list(answers.gradients)


def _uneven_sum(t: Tensor) -> Tensor:
    t = torch.view_as_real(t.resolve_conj()) if t.is_complex() else t
    weights = (
        torch.arange(t.numel(), dtype=torch.float64).mul(2.4).cos()
    )  # neighbours far apart, so that little cancels
    return (t * weights.to(t.dtype).view(t.shape)).sum()


def averaged(gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    """The mean over the ranks, which is the gradient under fullframe's convention and under torch's. Collective."""
    for gradient in gradients.values():
        gradient = gradient.resolve_conj()
        carried = torch.view_as_real(gradient) if gradient.is_complex() else gradient
        wide = carried.to(torch.float64, copy=True, memory_format=torch.contiguous_format)
        dist.all_reduce(wide)
        carried.copy_(wide / dist.get_world_size())
    return gradients


def digest(tensors: list[Tensor]) -> int:
    """Equal for equal bytes."""
    value = 0
    for tensor in tensors:
        tensor = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
        flat = tensor.resolve_neg().reshape(-1).clone(memory_format=torch.contiguous_format)  # also one of stride 3
        value = zlib.crc32(flat.view(torch.uint8).numpy().tobytes(), value)
    return value


def is_random(program: Program, plain: Answers) -> bool:
    """Whether the values follow from nothing, or from seeds of the shards; then only shapes and dtypes are compared."""
    family = program.entry.family.removeprefix("torch.")
    if family in UNSET:
        return True
    if family not in DRAWN_BY_SHARDS:
        return False
    try:
        other = program.run(None, seed=1)
    except Exception:
        return True
    return any(disagreement(t, other.tensors[name]) for name, t in plain.tensors.items())


def difference(program: Program, plain: Answers, split: Answers, random: bool) -> str:
    """The first thing in which they differ, "" if nothing; gradients are averaged already."""
    for name in plain.facts.keys() | split.facts.keys():
        if plain.facts.get(name) != split.facts.get(name):
            return f"{name}: {plain.facts.get(name)} expected, got {split.facts.get(name)}"
    if random:
        return ""
    again: list[Answers] = []
    coarsest = max((_epsilon(t.dtype) for name, t in plain.tensors.items() if _is_output(name, t)), default=0.0)
    for part in ("tensors", "gradients"):
        for name, expected in getattr(plain, part).items():
            got = getattr(split, part).get(name)
            if part == "gradients" and expected.dtype == torch.float16 and not expected.isfinite().all():
                continue  # a part's gradient is the ranks' number times the mean's, and overflows that much earlier
            epsilon = max(_epsilon(expected.dtype), coarsest if part == "gradients" else 0.0)
            reason = "missing" if got is None else disagreement(expected, got, FLOORS[part], epsilon)
            if reason and got is not None and _rounds(expected) and got.shape == expected.shape:
                again = again or [_in_float64(program) if _narrow(expected) else _nudged(program)]
                reason = _beyond_its_own_error(expected, got, getattr(again[0], part).get(name), reason)
            if reason:
                return f"{name}: {reason}"
    return ""


def _is_output(name: str, tensor: Tensor) -> bool:
    """Whether gradients come through it, rounded to its dtype: a part's is a share of one process's."""
    return name.startswith("output") and _rounds(tensor)


def _rounds(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _epsilon(dtype: torch.dtype) -> float:
    return EPSILON.get(dtype) or (torch.finfo(dtype).eps if dtype.is_floating_point or dtype.is_complex else 0.0)


def disagreement(expected: Tensor, got: Tensor, floor: float = FLOOR, epsilon: float | None = None) -> str:
    """Why two tensors differ, "" when they do not; `floor` is the least scale of a dtype narrower than float64."""
    if expected.shape != got.shape or expected.dtype != got.dtype:
        return f"{expected.dtype}{list(expected.shape)} expected, got {got.dtype}{list(got.shape)}"
    if expected.numel() == 0:
        return ""
    if not _rounds(expected):
        wrong = expected != got
        return f"{int(wrong.sum())} of {wrong.numel()} differ" if wrong.any() else ""
    epsilon = epsilon or _epsilon(expected.dtype)
    a, b = _wide(expected), _wide(got)
    if not torch.equal(a.isnan(), b.isnan()):
        return f"NaN: {int(a.isnan().sum())} expected, got {int(b.isnan().sum())}"
    if not torch.equal(a.isposinf(), b.isposinf()) or not torch.equal(a.isneginf(), b.isneginf()):
        return f"infinities: {int(a.isinf().sum())} expected, got {int(b.isinf().sum())}"
    finite = a.isfinite()
    a, b = a[finite], b[finite]
    if a.numel() == 0:
        return ""
    least = FLOOR if expected.dtype in (torch.float64, torch.complex128) else floor
    apart, scale = float((a - b).abs().max()), max(float(a.abs().max()), least)
    return f"differs by {apart / scale:.1e}" if apart > ULPS * epsilon * scale else ""


def _wide(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor.resolve_conj()).double() if tensor.is_complex() else tensor.double()


def _narrow(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.dtype != torch.float64


def _in_float64(program: Program) -> Answers:
    """The same program in float64, by which plain torch's own error is measured."""
    return _with(program, lambda t: t.double())


def _nudged(program: Program) -> Answers:
    """The same program with every input off by its last bit: how far rounding alone moves the results."""
    return _with(program, lambda t: t * (1 + torch.finfo(t.dtype).eps * (2 * torch.rand_like(t) - 1).sign()))


def _with(program: Program, changed: Callable[[Tensor], Tensor]) -> Answers:
    inputs = tree_map_only(
        Tensor,
        lambda t: changed(t.detach()).requires_grad_(t.requires_grad) if t.is_floating_point() else t,
        (program.sample.args, program.sample.kwargs),
    )
    module = own_copy(program.sample)
    sample = Sample(*inputs, module.double() if module is not None else None)
    try:
        return Program(program.entry, program.case, sample, program.mesh).run(None)
    except Exception:
        return Answers()


def _beyond_its_own_error(expected: Tensor, got: Tensor, exact: Tensor | None, reason: str) -> str:
    """`reason`, unless the split result is about as near to the exact (or nudged) one as plain torch's."""
    if exact is None or exact.shape != expected.shape or got.dtype != expected.dtype:
        return reason
    a, b, c = _wide(expected), _wide(got), _wide(exact)
    finite = a.isfinite() & b.isfinite() & c.isfinite()
    if not torch.equal(a.nan_to_num(), a.where(finite, b).nan_to_num()) or not finite.any():
        return reason
    own = float((a - c)[finite].abs().max())
    others = float((b - c)[finite].abs().max())
    unit = torch.finfo(expected.dtype).eps * max(float(c[finite].abs().max()), FLOOR)
    return "" if others <= 2 * own + 2 * unit else reason


def quietly(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The call, without the warnings of ops that will change some day."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return function(*args, **kwargs)

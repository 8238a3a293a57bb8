"""Which gradients travel together, and what the ranks must have in common for it."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor


def named_parameters_of(
    param_groups: Sequence[dict[str, list[Tensor]]], named: Iterable[tuple[str, Tensor]] | None
) -> dict[Tensor, str]:
    """The name of every parameter of an optimizer; ValueError where some have none, or two have one."""
    parameters = [parameter for group in param_groups for parameter in group["params"]]
    if named is None:
        return {parameter: f"allreduce.noname.{number}" for number, parameter in enumerate(parameters)}
    pairs = list(named)
    if any(not isinstance(pair, tuple) for pair in pairs):
        raise ValueError(
            "named_parameters should be a sequence of tuples (name, parameter), usually produced by "
            "model.named_parameters()."
        )
    names = [name for name, _ in pairs]
    twice = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    if twice:
        raise ValueError(f"Parameter names in named_parameters must be unique. Found duplicates: {', '.join(twice)}")
    found = {parameter: name for name, parameter in pairs}
    missing = [tuple(parameter.shape) for parameter in parameters if parameter not in found]
    if missing:
        raise ValueError(
            "named_parameters was specified, but one or more model parameters were not named; their shapes: "
            f"{', '.join(map(str, missing))}"
        )
    return {parameter: found[parameter] for parameter in parameters}


def grouped(
    parameters: Sequence[Tensor], groups: int | Sequence[Sequence[Tensor]] | None, limit_bytes: int
) -> list[list[Tensor]]:
    """Parameters in the groups that are reduced together: as asked for, else neighbours of up to `limit_bytes`.

    In the order in which backward comes to them: the last first. ValueError for groups that cannot be.
    """
    if isinstance(groups, int):
        if groups < 0:
            raise ValueError(f"groups should be a non-negative integer or a list of lists of tensors, got {groups}")
        size = -(-len(parameters) // groups) if groups else 0
        chosen = [list(parameters[i : i + size]) for i in range(0, len(parameters), size)] if groups else []
    else:
        chosen = [list(group) for group in groups or ()]
    trained = set(parameters)
    placed = {parameter for group in chosen for parameter in group}
    if len(placed) < sum(map(len, chosen)):
        raise ValueError("a parameter can only appear once in groups")
    found = [[p for p in group if p in trained] for group in chosen]
    rest = [parameter for parameter in parameters if parameter not in placed]
    return [*_by_size(rest[::-1], limit_bytes), *(group for group in found[::-1] if group)]


def _by_size(parameters: Iterable[Tensor], limit_bytes: int) -> list[list[Tensor]]:
    found: list[list[Tensor]] = []
    held: dict[object, int] = {}  # bytes of the open group of each dtype and device
    open_groups: dict[object, list[Tensor]] = {}
    for parameter in parameters:
        kind = parameter.dtype, parameter.device
        size = parameter.numel() * parameter.element_size()
        if kind not in open_groups or held[kind] + size > limit_bytes:
            open_groups[kind], held[kind] = [], 0
            found.append(open_groups[kind])
        open_groups[kind].append(parameter)
        held[kind] += size
    return found


def terms_of(parameters: Iterable[Tensor], names: Mapping[Tensor, str], compression: Any) -> str:
    """Of which parameters, in order, and by which compressor with which settings; a line each."""
    kind = compression if isinstance(compression, type) else type(compression)
    settings = {**vars(kind), **(getattr(compression, "__dict__", {}) if kind is not compression else {})}
    plain = {k: v for k, v in settings.items() if isinstance(v, (bool, int, float, str)) and not k.startswith("__")}
    lines = [f"compression={kind.__qualname__}", *(f"{kind.__qualname__}.{k}={v}" for k, v in plain.items())]
    return "\n".join([*lines, *(f"{names[one]} {tuple(one.shape)}" for one in parameters)])

"""Which programs are run of an entry: its variants, dtypes and values, and what of their arguments is split."""

import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from tests.whole.database import OTHERS, Entry, Sample

Mesh = tuple[int, int]  # height, width
NOT_PLANTED = {"special.legendre_polynomial_p"}  # of NaN torch makes whatever its vector unit held before
# At NaN these have one gradient in torch's vectors and another in what is left over at their ends.
TWO_GRADIENTS = {"softshrink", "hardshrink", "hardtanh", "relu6", "elu", "celu", "selu", "hardswish"}
# What of a transform is infinite and what NaN hangs on how many lines a vector unit does at once; of NaN all is NaN.
TRANSFORMS = ("fft.", "stft", "istft")

OUT_UNSET = {"fft.ihfftn"}  # over one dim torch 2.13 writes nothing into `out=`


@dataclass(frozen=True)
class Case:
    """One program: a sample's arguments given to a variant of the op, some of them split."""

    call: str  # "function", "method", "in-place", ..., "out split", "out whole", "write result", "write argument"
    sample: int
    dtype: str
    split: str = "all"  # of the tensors that can be: all, the first, or all but the first
    values: str = "given"  # as torch draws them, "planted" with infinities and NaN, or "wrong": torch refuses them
    gather: bool = False  # as under unsupported="gather"

    def facts(self) -> dict[str, Any]:
        """As a plain dict."""
        return asdict(self)

    def __str__(self) -> str:
        text = f"{self.call}, {self.dtype}, sample {self.sample}, split {self.split}"
        return text + f", values {self.values}" * (self.values != "given") + ", gather" * self.gather


def can_split(tensor: Tensor, mesh: Mesh) -> bool:
    """Whether `ff.shard` would cut it: its last two dims are as long as the mesh has ranks there."""
    return tensor.dim() >= 2 and tensor.shape[-2] >= mesh[0] and tensor.shape[-1] >= mesh[1]


def chosen(sample: Sample, split: str, mesh: Mesh) -> list[bool]:
    """Which of the sample's tensors become split ones."""
    able = [can_split(tensor, mesh) for tensor in sample.tensors()]
    first = able.index(True) if any(able) else -1
    picked = {"all": able, "first": [n == first for n in range(len(able))]}
    return picked[split] if split in picked else [a and n != first for n, a in enumerate(able)]


def cases(entry: Entry, mesh: Mesh, most: int) -> Iterator[Case]:
    """The cases of an entry; `most` bounds how many samples each kind of case takes."""
    main = entry.main
    if main is None:
        return
    samples = entry.samples(main)
    name = str(main).removeprefix("torch.")
    able = [n for n, sample in enumerate(samples) if any(chosen(sample, "all", mesh))]
    several = [n for n in able if any(chosen(samples[n], "others", mesh))]
    mixed = [n for n in able if sum(t.dim() > 0 for t in samples[n].tensors()) > 1]

    def each(call: str, among: Sequence[int], share: int, **facts: Any) -> Iterator[Case]:
        return (Case(call, n, name, **facts) for n in some(among, max(1, most // share)))

    yield from each("function", able, 1)
    yield from each("function", [n for n in some(able, most) if n in mixed], 1, split="first")
    yield from each("function", several, 2, split="others")
    if main.is_floating_point:
        yield from each("function", able, 2, values="planted")
        yield from each("function", mixed, 6, values="planted", split="first")
    yield from each("function", able, 3, gather=True)
    yield from each("function", several, 6, gather=True, split="others")
    for call in entry.calls:
        if call != "function":
            yield from each(call, able, 4)
    in_place = [call for call in entry.calls if "in-place" in call]
    for call in in_place[:1]:
        yield from each(call, several, 6, split="others")
        yield from each(call, mixed, 6, split="first")
        yield from each(call, able, 6, gather=True)
    if entry.has_out and entry.name not in OUT_UNSET:
        yield from each("out split", able, 6)
        yield from each("out whole", able, 6)
    if not entry.name.startswith("module "):
        yield from each("write result", able, 4)
        yield from each("write argument", able, 6)
        yield from each("write result", able, 8, gather=True)
    yield from _others(entry, mesh, most)


def _others(entry: Entry, mesh: Mesh, most: int) -> Iterator[Case]:
    """Other dtypes, and what torch refuses."""
    for dtype in OTHERS:
        if dtype in entry.dtypes and dtype != entry.main:
            able = [n for n, sample in enumerate(entry.samples(dtype)) if any(chosen(sample, "all", mesh))]
            for n in some(able, max(1, most // 8)):
                yield Case("function", n, str(dtype).removeprefix("torch."))
    wrong = [n for n, sample in enumerate(entry.wrong()) if any(chosen(sample, "all", mesh))]
    for n in some(wrong, max(2, most)):
        yield Case("function", n, "any", values="wrong")


def some(among: Iterable[int], count: int) -> list[int]:
    """`count` of them, scattered alike in every run; a larger count takes the same ones and more."""
    return sorted(sorted(among, key=lambda n: zlib.crc32(str(n).encode()))[:count])


def sample_of(entry: Entry, case: Case) -> Sample:
    """The arguments of a case, before anything is planted."""
    return (
        entry.wrong()[case.sample] if case.values == "wrong" else entry.samples(getattr(torch, case.dtype))[case.sample]
    )


def planted(tensor: Tensor, entry: Entry, case: Case) -> Tensor:
    """A copy with infinities or NaN at places that depend on the case only; some lie on one rank alone."""
    if not tensor.is_floating_point() or tensor.numel() < 2 or entry.name in NOT_PLANTED:
        return tensor
    tensor = tensor.detach().clone()
    flat, size = tensor.reshape(-1), tensor.numel()
    kind = (zlib.crc32(entry.name.encode()) + case.sample) % 6
    if kind in (2, 3) and entry.name.lower().rpartition(".")[2] in TWO_GRADIENTS:
        kind = 0
    if entry.name.startswith(TRANSFORMS):
        kind = 2
    if kind == 0:
        flat[size - 1] = torch.inf
    elif kind == 1:
        flat[0] = -torch.inf
    elif kind == 2:
        flat[size // 3] = torch.nan
    elif kind == 3:
        flat[size - 1] = torch.nan
    elif kind == 4:
        flat[size // 4], flat[size - 1 - size // 4] = torch.inf, -torch.inf
    elif tensor.dim():  # as an attention mask does: the right half
        tensor[..., tensor.shape[-1] // 2 :] = -torch.inf
        return tensor
    return flat.view(tensor.shape)


def described(entry: Entry, case: Case, sample: Sample, mesh: Mesh) -> str:
    """The call as one would write it, with S before the shapes of what is split."""
    split = iter(chosen(sample, case.split, mesh))

    def shown(value: Any) -> str:
        if isinstance(value, Tensor):
            dtype = str(value.dtype).removeprefix("torch.")
            return f"{'S' if next(split) else ''}{dtype}{list(value.shape)}"
        if isinstance(value, (list, tuple)):
            inside = ", ".join(shown(v) for v in value)
            return f"[{inside}]" if isinstance(value, list) else f"({inside})"
        if isinstance(value, dict):
            return ", ".join(f"{key}={shown(v)}" for key, v in value.items())
        return repr(value)[:60]

    arguments = ", ".join([shown(a) for a in sample.args] + ([shown(sample.kwargs)] if sample.kwargs else []))
    module = f"[{sample.module}]" if sample.module is not None else ""
    return f"{entry.name}{module}({arguments})"

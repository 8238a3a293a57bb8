"""Steps of random programs that perception code takes besides layers: masks, points, tables, order, counts, cells."""

import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fullframe as ff

Step = tuple[str, Callable[[Tensor], Tensor]]


def _apart(x: Tensor) -> Tensor:
    """`x` without ties, which rounding would break another way on each mesh."""
    count = torch.Size(x.shape[-2:]).numel() * x.shape[1]
    return x + 0.01 * torch.arange(count, dtype=torch.float64).mul(2.4).sin().to(x.dtype).view(x.shape[1:])


def _whole(x: Tensor, *shape: int) -> Tensor:
    return torch.linspace(-1, 1, torch.Size(shape).numel(), dtype=torch.float64).mul(9).cos().view(shape).to(x.dtype)


def _labels(x: Tensor, classes: int) -> Tensor:
    return (x.detach().abs() * 5).nan_to_num(0, 0, 0).clamp(max=1e4).long() % classes


def _each(x: Tensor, found: Tensor) -> Tensor:
    """`x` times the mean of what was found, so that the image goes on."""
    return x * (1 + found.to(x.dtype).mean().tanh())


def masks(r: random.Random, x: Tensor) -> Step:
    """What a mask picks, and writes at a mask."""
    low, c = r.choice([-0.4, 0.1, 0.6]), x.shape[1]
    kind = r.choice(["mean", "write", "assign", "rows", "cumsum", "nested", "scatter", "select", "two", "places",
                     "beside", "loss", "sort", "columns"])  # fmt: skip
    return f"mask {kind} {low}", {
        "mean": lambda x: _each(x, x[x > low]),
        "write": lambda x: _written(x, x > low, lambda p: p.sin() * 2),
        "assign": lambda x: _written(x, x[:, 0] > low, lambda _: 0.5, True),
        "rows": lambda x: _each(x, x.permute(0, 2, 3, 1)[x[:, 0] > low] @ _whole(x, c, 3)),
        "cumsum": lambda x: _each(x, x[x > low].cumsum(0) * 0.1),
        "nested": lambda x: _nested(x, low),
        "scatter": lambda x: x.masked_scatter(x > low, x.flatten().sin()),
        "select": lambda x: _each(x, x.masked_select(x[:, :1] > low).square()),
        "two": lambda x: _each(x, x[x > low] - x.sin()[x > low]) + x[x < low].sum().tanh(),
        "places": lambda x: _each(x, x[torch.where(x[0, 0] > low)[0].new_zeros(1), :, torch.tensor([0])]),
        "beside": lambda x: _each(x, x.permute(0, 2, 3, 1)[x[:, 0] > low, _labels(x[:, 0], c)[x[:, 0] > low]]),
        "loss": lambda x: _each(x, F.smooth_l1_loss(x[x > low], x.detach()[x > low].cos())),
        "sort": lambda x: _each(x, _apart(x)[x > low].sort().values[:7]),
        "columns": lambda x: _each(x, x[:, :, x[0, 0].detach().amax(1) > low]),
    }[kind]


def _nested(x: Tensor, low: float) -> Tensor:
    picked = x[x > low]
    return _each(x, picked[picked < low + 0.5] * 2)


def _written(x: Tensor, mask: Tensor, made: Callable[[Tensor], Any], channels: bool = False) -> Tensor:
    x = x * 1
    (x.movedim(1, 3) if channels else x)[mask] = made(x[mask] if not channels else x)
    return x


def points(r: random.Random, x: Tensor) -> Step:
    """Reads and writes at positions, whole or split, and tables that a map reads."""
    n, c, h, w = x.shape
    ys, xs = (torch.tensor([r.randrange(size) for _ in range(5)]) for size in (h, w))
    dim, size = r.choice([(2, h), (3, w)])
    rows = torch.tensor([r.randrange(size) for _ in range(r.choice([3, size]))])
    kind = r.choice(["points", "grid", "gather", "permuted", "rows", "take", "table", "embedding", "scatter_add",
                     "scatter", "index_add", "index_put", "index_fill", "one hot", "isin", "buckets",
                     "whole mask"])  # fmt: skip
    return f"{kind} {dim} {len(rows)}", {
        "points": lambda x: _each(x, x[:, :, ys, xs].sin()),
        "grid": lambda x: _each(x, F.grid_sample(x, _whole(x, n, 4, 1, 2), align_corners=False)),
        "gather": lambda x: x.gather(dim, _labels(x, size)),
        "permuted": lambda x: x.take_along_dim(_apart(x).detach().argsort(dim), dim),
        "rows": lambda x: x.index_select(dim, rows),
        "take": lambda x: _each(x, x.take(ys * 3 + xs)),
        "table": lambda x: x * _whole(x, 7)[_labels(x, 7)],
        "embedding": lambda x: F.embedding(_labels(x[:, 0], 5), _whole(x, 5, c)).permute(0, 3, 1, 2) * x,
        "scatter_add": lambda x: (x * 2).scatter_add(dim, _labels(x, size), x.sin()),
        "scatter": lambda x: x.scatter(1, _labels(x, c)[:, :1], 0.5),
        "index_add": lambda x: x.index_add(dim, rows, x.sum(dim, True).repeat_interleave(len(rows), dim)),
        "index_put": lambda x: _set(x, (slice(None), slice(None), ys[:3], xs[:3]), _whole(x, c, 3)),
        "index_fill": lambda x: x.index_fill(dim, rows, -0.5),
        "one hot": lambda x: F.one_hot(_labels(x[:, 0], c), c).permute(0, 3, 1, 2) * x,
        "isin": lambda x: x * torch.isin(_labels(x, 9), _labels(x[:, :1, :2], 9)),
        "buckets": lambda x: x * torch.bucketize(x.detach(), torch.tensor([-0.5, 0.2, 0.9], dtype=x.dtype)),
        "whole mask": lambda x: x * _set(torch.ones(n, c, h, w + 1), (..., slice(1, None)), x.detach() > 0.1)[..., 1:],
    }[kind]  # fmt: skip


def _set(x: Tensor, index: Any, value: Tensor) -> Tensor:
    x = x > 0 if value.dtype == torch.bool else x * 1
    x[index] = value
    return x


def order(r: random.Random, x: Tensor) -> Step:
    """What orders, counts and compares."""
    dim, k = r.choice([1, 2, 3]), r.randint(1, 4)
    kind = r.choice(["topk", "top tokens", "sort", "median", "quantile", "kthvalue", "unique", "slices", "bincount",
                     "histc", "argmax", "cummax", "cosine", "cov", "cdist", "classes", "searchsorted"])  # fmt: skip
    return f"{kind} {dim} {k}", {
        "topk": lambda x: _apart(x).topk(min(k, x.shape[dim]), dim).values,
        "top tokens": lambda x: _top_tokens(x, k),
        "sort": lambda x: _apart(x).sort(dim, descending=k > 2).values,
        "median": lambda x: x - _apart(x).median(dim, True).values,
        "quantile": lambda x: x - _apart(x).quantile(k / 5, dim, True),
        "kthvalue": lambda x: _each(x, _apart(x).flatten(1).kthvalue(k).values),
        "unique": lambda x: _each(x, _labels(x, 9).unique(return_counts=True)[1] * 0.1),
        "slices": lambda x: _each(x, (_labels(x, 2)[0, 0]).unique(dim=k % 2) * 0.1),
        "bincount": lambda x: _each(x, torch.bincount(_labels(x, 9).flatten(), minlength=9) * 0.01),
        "histc": lambda x: _each(x, x.detach().histc(5, -1, 1) * 0.01),
        "argmax": lambda x: x * _apart(x).argmax(dim, True),
        "cummax": lambda x: _apart(x).cummax(dim).values,
        "cosine": lambda x: x * F.cosine_similarity(x, x.cos(), dim).unsqueeze(dim),
        "cov": lambda x: _each(x, x[0].flatten(1).cov() - x[1, 0].mT.corrcoef()[:1, :2]),
        "cdist": lambda x: _each(x, torch.cdist(x.flatten(2).mT, _whole(x, 2, 3, x.shape[1]))),
        "classes": lambda x: x - _labels(x, 5).sum(dim, keepdim=True) * 0.01,
        "searchsorted": lambda x: x * torch.searchsorted(_whole(x, 6).sort().values, x.detach()) * 0.2,
    }[kind]


def _top_tokens(x: Tensor, k: int) -> Tensor:
    tokens = x.flatten(2).mT
    places = _apart(x).mean(1).flatten(1).topk(k, 1).indices
    return _each(x, tokens.gather(1, places[..., None].expand(-1, -1, x.shape[1])).sin())


def others(r: random.Random, x: Tensor) -> Step:
    """Pooling's places, halves, copies, waves, draws, cells, and a way back in."""
    dim, k = r.choice([1, 2, 3]), r.randint(1, 3)
    kind = r.choice(["unpool", "fractional", "glu", "repeat", "tile", "interleave", "fft", "rfft2", "stft",
                     "multinomial", "gru", "lstm", "from_local", "rot90", "response", "split channels", "split norm",
                     "pairs"])  # fmt: skip
    return f"{kind} {dim} {k}", {
        "unpool": lambda x: _unpooled(_apart(x), k + 1),
        "fractional": lambda x: F.fractional_max_pool2d(_apart(x), 2, (x.shape[2] // 2, x.shape[3] // 2)),
        "glu": lambda x: F.glu(x, dim),
        "repeat": lambda x: x[:, :, :9].repeat(1, 1, *((2, 1) if dim == 2 else (1, 2))),
        "tile": lambda x: x[..., :9].tile((k, 1)),
        "interleave": lambda x: x[..., :9].repeat_interleave(torch.arange(min(9, x.shape[3])) % k + 1, 3),
        "fft": lambda x: torch.fft.ifft(torch.fft.fft(x, dim=dim) * 2, dim=dim).real,
        "rfft2": lambda x: torch.view_as_real(torch.fft.rfft2(x, norm="ortho")).sum(-1),
        "stft": lambda x: _each(x, torch.view_as_real(torch.stft(x.flatten(2)[0], 8, return_complex=True))),
        "multinomial": lambda x: _drawn(x, k),
        "gru": lambda x: _cell(nn.GRUCell, x),
        "lstm": lambda x: _cell(nn.LSTMCell, x),
        "from_local": _of_parts,
        "rot90": lambda x: x.rot90(k, (2, 3)),
        "response": lambda x: F.local_response_norm(x, 3),
        "split channels": lambda x: F.conv2d(x.transpose(1, dim), _whole(x, 2, x.shape[dim], 1, 1)),
        "split norm": lambda x: F.group_norm(x.transpose(1, dim), 1),
        "pairs": lambda x: _each(x, F.pdist(x[0, 0, :, :4].contiguous())),
    }[kind]  # fmt: skip


def _of_parts(x: Tensor) -> Tensor:
    return ff.from_local(x.local * 2, x.device_mesh, like=x) if isinstance(x, ff.SpatialTensor) else x * 2


def _unpooled(x: Tensor, k: int) -> Tensor:
    pooled, places = F.max_pool2d(x, k, return_indices=True)
    return F.max_unpool2d(pooled, places, k, output_size=x.shape[2:])


def _drawn(x: Tensor, k: int) -> Tensor:
    chances = x.detach().flatten(2).mean(1).sigmoid()
    places = torch.multinomial(chances, k)
    return _each(x, x.flatten(2).gather(2, places[:, None].expand(-1, x.shape[1], -1)))


def _cell(kind: type[nn.Module], x: Tensor) -> Tensor:
    """A recurrent cell of every pixel."""
    c = x.shape[1]
    cell: Any = kind(c, c).to(x.dtype)
    weights = {name: _whole(x, *p.shape) for name, p in cell.named_parameters()}
    rows = x.permute(0, 2, 3, 1).reshape(-1, c)
    state = rows.sin() if kind is nn.GRUCell else (rows.sin(), rows.cos())
    found = torch.func.functional_call(cell, weights, (rows, state))
    found = found if isinstance(found, Tensor) else found[0] + found[1]
    return found.view(x.shape[0], *x.shape[2:], c).permute(0, 3, 1, 2)


IDIOMS = [masks, points, order, others]

"""The transformer modules of torch.nn, unmodified, on split tokens: train and eval."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

import fullframe as ff
from tests.exactness import mesh, relative
from tests.rank_group import rank_group
from tests.spatial.cases import Case, Op, as_in_one_process

SIZES = ((5, 7),)
TINY: dict[str, Any] = {"dim_feedforward": 6, "dropout": 0.0, "dtype": torch.float64}


def of_module(make: Callable[[], nn.Module], call: Callable[..., Any], split: int = 1) -> Case:
    """A case whose whole operands are the module's parameters, drawn as all operands are."""
    shapes = {name: tuple(p.shape) for name, p in make().named_parameters()}

    def op(*tensors: Tensor) -> Any:
        module = make()
        parameters = {name: t * 0.5 for name, t in zip(shapes, tensors[split:], strict=True)}

        def run(*args: Any, **kwargs: Any) -> Any:
            return functional_call(module, parameters, args, kwargs)

        return call(run, *tensors[:split])

    return Case(op, split=((2, 4),) * split, whole=tuple(shapes.values()), sizes=SIZES)


def rows(x: Tensor) -> Tensor:
    """(N, C, H, W) as tokens (N, H * W, C)."""
    return x.flatten(2).transpose(1, 2)


def padding(x: Tensor) -> Tensor:
    """(N, H * W), which tokens are left out."""
    return (torch.arange(x.shape[2] * x.shape[3]) % 5 == 3).expand(x.shape[0], -1)


def earlier(count: int) -> Tensor:
    return nn.Transformer.generate_square_subsequent_mask(count, dtype=torch.float64)


def masked(run: Op, x: Tensor) -> list[Any]:
    t, count = rows(x).transpose(0, 1), x.shape[2] * x.shape[3]
    out = []
    for weights in (True, False):
        out += [
            run(t, t, t, key_padding_mask=padding(x), need_weights=weights),
            run(t, t, t, attn_mask=earlier(count), need_weights=weights, is_causal=True),
            run(t, t, t, attn_mask=earlier(count).expand(4, -1, -1), need_weights=weights, average_attn_weights=False),
            run(t, t, t, attn_mask=earlier(count) < 0, key_padding_mask=padding(x), need_weights=weights),
            run(t[:, 0], t[:, 1], t[:, 1], need_weights=weights),
            run(t[:, 0], t[:, 1], t[:, 1], key_padding_mask=padding(x)[0], need_weights=weights),
        ]
    return out


def object_queries(run: Op, x: Tensor, y: Tensor) -> list[Any]:
    """Whole queries, as a detector's decoder has them, and keys of another map than values."""
    k, v = rows(x), rows(y)
    queries = torch.linspace(-1, 1, 24, dtype=torch.float64).view(1, 6, 4).expand(2, -1, -1)
    return [run(queries, k, v), run(queries, k, v, need_weights=False), run(k, queries, queries)]


def tiny(kind: Any, **options: Any) -> Callable[[], nn.Module]:
    return lambda: kind(4, 2, **{**TINY, **options})


def encoder(layers: int = 2, **options: Any) -> Callable[[], nn.Module]:
    return lambda: nn.TransformerEncoder(
        nn.TransformerEncoderLayer(4, 2, **{**TINY, **options}),
        layers,
        nn.LayerNorm(4, dtype=torch.float64),
        enable_nested_tensor=not options.get("norm_first"),
    )


def attention(**options: Any) -> Callable[[], nn.Module]:
    return lambda: nn.MultiheadAttention(4, 2, **options, dtype=torch.float64)


CASES: dict[str, Case] = {
    "masks": of_module(attention(), masked),
    "more keys": of_module(attention(add_bias_kv=True, add_zero_attn=True), masked),
    "no bias": of_module(attention(bias=False, kdim=4, vdim=4), masked),
    "objects": of_module(attention(batch_first=True), object_queries, 2),
    "objects of their own width": of_module(attention(batch_first=True, kdim=4, add_zero_attn=True), object_queries, 2),
    "encoder": of_module(encoder(batch_first=True), lambda run, x: run(rows(x))),
    "encoder, norm first, padding": of_module(
        encoder(norm_first=True, activation="gelu"),
        lambda run, x: run(rows(x).transpose(0, 1), src_key_padding_mask=padding(x)),
    ),
    "encoder, causal": of_module(
        encoder(batch_first=True), lambda run, x: run(rows(x), mask=earlier(x.shape[2] * x.shape[3]), is_causal=True)
    ),
    "decoder layer": of_module(
        tiny(nn.TransformerDecoderLayer, batch_first=True),
        lambda run, x, y: [run(rows(x), rows(y)), run(rows(x)[0, :3] + 0 * x.sum(), rows(y)[0])],
        2,
    ),
    "transformer": of_module(
        tiny(nn.Transformer, num_encoder_layers=1, num_decoder_layers=1, batch_first=True),
        lambda run, x, y: run(rows(x), rows(y), memory_key_padding_mask=padding(x)),
        2,
    ),
}

test_as_in_one_process = as_in_one_process(__name__, CASES)


def _inferred() -> list[float]:
    """Where torch takes its fused kernels of whole layers: in evaluation, without gradients."""
    torch.manual_seed(0)
    model = encoder(batch_first=True)().eval()
    alone = attention(batch_first=True)().eval()
    errors = []
    x = torch.randn(2, 4, 5, 7, dtype=torch.float64)
    late = torch.arange(35).expand(2, -1) < 4
    nothing = torch.zeros(2, 35, dtype=torch.bool)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            split = ff.shard(x, mesh(1, 2))
            for options in ({}, *({"src_key_padding_mask": mask} for mask in (late, nothing, padding(x)))):
                expected, got = (model(rows(t), **options) for t in (x, split))
                errors.append(relative(expected, got.full()))
            for weights in (True, False):
                expected, got = (alone(rows(t), rows(t), rows(t), need_weights=weights) for t in (x, split))
                errors += [relative(a, b.full()) for a, b in zip(expected, got, strict=True) if a is not None]
    return errors


def test_evaluation_does_without_torchs_kernels_of_whole_layers() -> None:
    for errors in rank_group(2).run(_inferred):
        assert max(errors) < 1e-12, errors


def _refused() -> list[str]:
    """The kinds of error: padding that torch cuts off in evaluation, and a hint of causality without a mask."""
    x = ff.shard(torch.randn(2, 4, 5, 7, dtype=torch.float64), mesh(1, 2))
    kinds = []
    for call in (
        lambda: encoder(batch_first=True)().eval()(rows(x), src_key_padding_mask=torch.arange(35).expand(2, -1) > 30),
        lambda: attention()()(rows(x), rows(x), rows(x), need_weights=False, is_causal=True),
    ):
        try:
            with torch.no_grad():
                call()
        except Exception as error:
            kinds.append(type(error).__name__)
    return kinds


def test_what_is_refused() -> None:
    for kinds in rank_group(2).run(_refused):
        assert kinds == ["UnsupportedOp", "RuntimeError"]


def _trained_with_dropout() -> list[float]:
    torch.manual_seed(0)
    model = encoder(batch_first=True, dropout=0.3)()
    out = model(rows(ff.shard(torch.randn(2, 4, 5, 7, dtype=torch.float64), mesh(1, 2))))
    out.square().mean().backward()
    return [float(out.full().std()), float(torch.rand(()))]


def test_dropout_leaves_all_ranks_alike() -> None:
    answers = rank_group(2).run(_trained_with_dropout)
    assert answers[0] == answers[1]

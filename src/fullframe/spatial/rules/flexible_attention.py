"""`flex_attention`: queries stay split, and a score or mask function is asked with places in the whole tensor.

torch hands it to no `__torch_function__`; importing this module makes it do so. Keys and values are gathered where
queries are split, and kept so for backward. What runs is torch's own, not compiled: the scores of a rank take memory.
"""

from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask, flex_attention

from fullframe.ranks.collectives import all_gather, all_sum
from fullframe.ranks.mesh import Spatial
from fullframe.spatial.gradients import enter, mean_over_ranks
from fullframe.spatial.rules.matmul import Shared, result_spec, shared, whole_in
from fullframe.spatial.rules.registry import TooSmall, Unsupported, rule
from fullframe.spatial.tensor import SpatialTensor, wrap


# Its code becomes that of torch's function, so that all names it goes by hand on. `flex_attention` is torch's global.
def _handing_on(  # type: ignore[no-untyped-def]
    query, key, value, score_mod=None, block_mask=None, scale=None, enable_gqa=False, return_lse=False,
    kernel_options=None, *, return_aux=None
):  # fmt: skip
    options = (score_mod, block_mask, scale, enable_gqa, return_lse, kernel_options)
    given = (query, key, value)
    if torch.overrides.has_torch_function(given):
        call: Any = torch.overrides.handle_torch_function
        if torch.compiler.is_dynamo_compiling():
            call = torch._dynamo.disable(call, reason="split tensors go to fullframe's rule, which is not compiled")
        return call(flex_attention, given, *given, *options, return_aux=return_aux)
    return flex_attention.of_plain_tensors(*given, *options, return_aux=return_aux)  # type: ignore[attr-defined]


def _made_to_hand_on(function: Any) -> Callable[..., Any]:
    """Torch's function as it was."""
    own = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__)
    own.__kwdefaults__ = function.__kwdefaults__
    function.of_plain_tensors = own
    function.__code__ = _handing_on.__code__
    return own


_attend = _made_to_hand_on(flex_attention)


@rule(flex_attention, checked=False)
def _flex_attention(
    func: Any, query: Tensor, key: Tensor, value: Tensor, score_mod: Any = None, block_mask: BlockMask | None = None,
    scale: float | None = None, enable_gqa: bool = False, return_lse: bool = False, kernel_options: Any = None,
    *, return_aux: AuxRequest | None = None,
) -> Any:  # fmt: skip
    """Queries (B, H, L, E), keys (B, H, S, E), values (B, H, S, F), each split anyhow or whole.

    Refuses split tensors that `score_mod` or `block_mask` reads, and the largest scores where keys alone are split.
    """
    grouped = enable_gqa and query.shape[1] != key.shape[1]
    query, key, value = (whole_in(t, -1, *([-3] if grouped else [])) for t in (query, key, value))
    options: dict[str, Any] = {"scale": scale, "enable_gqa": enable_gqa, "kernel_options": kernel_options}
    given = [query, key, value]
    if not any(isinstance(t, SpatialTensor) for t in given):
        return func(*given, score_mod, block_mask, return_lse=return_lse, return_aux=return_aux, **options)
    if any(t.dim() != 4 for t in given):
        raise NotImplementedError("NYI: query, key, and value must be 4D tensors")  # as torch does
    sizes = dict(zip("BHLF", (*query.shape[:3], value.shape[3]), strict=True)) | {"S": key.shape[2]}
    if block_mask is not None and block_mask.shape[-2:] not in ((sizes["L"], sizes["S"]), (1, 1)):
        raise ValueError(f"a block_mask of {block_mask.shape} for {sizes['L']} queries and {sizes['S']} keys")
    heads = "K" if grouped else "H"
    parts = shared(given, ["BHLE", f"B{heads}SE", f"B{heads}SF"])
    _require_rows(parts)
    over = parts.axes_of("S")
    aux = return_aux or AuxRequest(lse=return_lse)
    if over and aux.max_scores:
        raise Unsupported("it asks for the largest scores, of split keys")
    places = [
        parts.places(letter, sizes[letter], torch.int32) if parts.axes_of(letter) else None for letter in "BHLS"
    ]  # None where this rank has all
    if score_mod is not None:
        options["score_mod"] = _at_places(score_mod, places, 1)
    if block_mask is not None:
        options["block_mask"] = _mask_of(block_mask, parts, places)
    out, found = _of_this_rank(parts, options, AuxRequest(bool(aux.lse or over), bool(aux.max_scores)))
    lse, largest = found.lse, found.max_scores
    if over:
        out, lse = _put_together(out, lse, parts.spec.spatial, over)
    out = wrap(out, result_spec(parts.spec, "BHLF", sizes, parts.cuts))
    rows = result_spec(parts.spec, "BHL", sizes, parts.cuts)
    if return_aux is None:
        return (out, wrap(lse, rows)) if return_lse else out
    return out, AuxOutput(wrap(lse, rows) if aux.lse else None, None if largest is None else wrap(largest, rows))


def _require_rows(parts: Shared) -> None:
    """Raises TooSmall where some rank has nothing of a dim."""
    for axis, (_, placement) in parts.cuts.items():
        if placement.extents.has_empty:
            raise TooSmall([axis])


def _at_places(function: Any, places: list[Tensor | None], before: int) -> Any:
    """`function`, whose arguments behind the first `before` are places, asked with those in the whole tensor."""

    def at_places(*given: Any) -> Any:
        found = [i if p is None else p[i] for i, p in zip(given[before:], places, strict=True)]
        return function(*given[:before], *found)

    return at_places


def _mask_of(block_mask: BlockMask, parts: Shared, places: list[Tensor | None]) -> BlockMask:
    """The mask of this rank's queries and keys, as one block."""
    query, key, _ = parts.locals
    one, rows = torch.ones(len(query), 1, 1, dtype=torch.int32, device=query.device), (query.shape[2], key.shape[2])
    mask = _at_places(block_mask.mask_mod, places, 0)
    return BlockMask.from_kv_blocks(one, one[..., None] - 1, BLOCK_SIZE=rows, mask_mod=mask, seq_lengths=rows)


def _of_this_rank(parts: Shared, options: dict[str, Any], aux: AuxRequest) -> Any:
    """Torch's own, of the local tensors; refused by name where it cannot trace what the functions read."""
    try:
        out, found = _attend(*parts.locals, return_aux=aux, **options)
    except torch._dynamo.exc.TorchDynamoException as error:
        raise Unsupported(
            "torch cannot trace its score_mod or mask_mod, as where they read a split tensor",
            "Let them read whole tensors alone (x.full()), or use F.scaled_dot_product_attention.",
        ) from error
    if out.grad_fn is not None:
        own = [get_gradient_edge(t) for t in parts.locals if t.requires_grad]
        _averaged(out.grad_fn, [(edge.node, edge.output_nr) for edge in own], parts.spec.spatial)
    return out, found


def _averaged(node: Node, own: list[tuple[Node, int]], spatial: Spatial) -> None:
    """Gradients of the whole tensors that the functions read, of which this rank has a share: the mean over ranks."""
    inputs = [n for n, edge in enumerate(node.next_functions) if edge[0] is not None and edge not in own]
    leaves = {n: getattr(node.next_functions[n][0], "variable", None) for n in inputs}
    for leaf in leaves.values():
        if isinstance(leaf, nn.Parameter):
            enter(leaf, spatial)
    shares = [n for n in inputs if not isinstance(leaves[n], nn.Parameter)]

    def average(gradients: Any, _: Any) -> Any:
        return tuple(mean_over_ranks(g, spatial.replica) if n in shares else g for n, g in enumerate(gradients))

    if shares:
        node.register_hook(average)


def _put_together(out: Tensor, lse: Tensor, spatial: Spatial, over: list[str]) -> tuple[Tensor, Tensor]:
    """Result and logarithm of the summed powers over the keys of all ranks, from those over each rank's."""
    group = spatial.group(over)
    everyone = all_gather(lse, group)
    unseen = (everyone == -torch.inf).all(0)  # by any key: zeros, as in torch
    total = everyone.masked_fill(unseen, 0).logsumexp(0)
    weight = (lse - total).masked_fill(unseen, -torch.inf).exp()
    return all_sum(out * weight[..., None].to(out.dtype), group), total.masked_fill(unseen, -torch.inf)

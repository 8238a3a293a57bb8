"""Parameters that an optimizer steps and no parallel model holds: a criterion's, or those of a head that was forgotten.

Where they meet split tensors their gradients are averaged; where they meet whole numbers alone nothing averages them,
and replicas would part unheard.
"""

import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from fullframe.ranks.agreement import first_to_say
from fullframe.ranks.channel import generation
from fullframe.ranks.raw_bytes import checksums
from fullframe.spatial.gradients import is_managed
from fullframe.wording import plural

Groups = Sequence[dict[str, Any]]


def strangers(groups: Groups) -> Iterator[tuple[int, int, nn.Parameter]]:
    """Each with its group and its place there; no sharded ones, nor what is no parameter."""
    for number, group in enumerate(groups):
        for place, parameter in enumerate(group["params"]):
            if type(parameter) is nn.Parameter and parameter.requires_grad and not is_managed(parameter):
                yield number, place, parameter


_looked_at: Any = WeakIdKeyDictionary()
_asked: Counter[str] = Counter()  # how often of parameters of these shapes


def warn_of_strangers(groups: Groups) -> None:
    """Before a step with strangers alone: warn once of each, on one rank, where ranks have other gradients of it.

    Ranks leave word of theirs and wait for nobody, as such an optimizer may be one rank's own. Whoever averages
    gradients by hand, or steps with copies of averaged ones, has the same on all.
    """
    new = [p for _, _, p in strangers(groups) if p.grad is not None and p not in _looked_at]
    _looked_at.update(dict.fromkeys(new))
    gradients = [p.grad for p in new if p.grad is not None and p.grad.layout == torch.strided]
    if not gradients or not dist.is_initialized() or dist.get_backend() == "fake":
        return
    shapes = ", ".join(str(tuple(gradient.shape)) for gradient in gradients[:3]) + ", ..." * (len(gradients) > 3)
    what = f"gradients of no model's parameters {shapes}, {generation()}"
    _asked[what] += 1
    what, mine, rank = f"{what}, {_asked[what]}", str(checksums(gradients)), str(dist.get_rank())
    if first_to_say(what, mine) != mine and first_to_say(f"{what}, told", rank) == rank:
        warnings.warn(
            f"an optimizer steps with {plural(len(gradients), 'parameter')} that no parallel model holds (of shape "
            f"{shapes}), of which ranks have other gradients, each of its own samples, so that they get other values; "
            "give the module that has them to ff.parallelize, too, or average their .grad over the ranks before the "
            "step",
            stacklevel=2,
        )

"""DistributedDataParallel on fake tensors, which torch's own refuses: its buckets, its copies and its messages.

As with `gradient_as_bucket_view`: a gradient is copied into its bucket and lies there from then on, between steps too.
"""

from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fullframe.ranks.raw_bytes import BUCKET_BYTES
from fullframe.simulation.fake.numbers import take

_FIRST_BYTES = 1 << 20  # of DDP's first bucket


class FakeDataParallel(nn.Module):
    """In the place of DistributedDataParallel, for its memory and its messages."""

    in_buckets = True

    def __init__(self, module: nn.Module, **options: Any):
        super().__init__()
        self.module = module
        self._shares_buffers = any(map(options.get, ("forward_sync_buffers", "broadcast_buffers")))
        self._is_due = True  # after a forward pass whose gradients are sent
        self.buckets: list[Tensor] = []
        self.require_backward_grad_sync = True  # outside no_sync()
        parameters = [p for p in reversed(list(module.parameters())) if p.requires_grad]
        numbers, _ = dist._compute_bucket_assignment_by_size(list[Tensor](parameters), [_FIRST_BYTES, BUCKET_BYTES])
        for bucket in numbers:
            self._make_bucket([parameters[number] for number in bucket])

    def _make_bucket(self, parameters: list[nn.Parameter]) -> None:
        flat = parameters[0].new_empty(sum(p.numel() for p in parameters)) if self.in_buckets else None
        views = [None] * len(parameters) if flat is None else flat.split([p.numel() for p in parameters])
        missing = set(parameters)

        def arrived(parameter: nn.Parameter, place: Tensor | None) -> None:
            if not self.require_backward_grad_sync:
                return
            if place is not None and parameter.grad is not None and parameter.grad is not place:
                place.copy_(parameter.grad)
                parameter.grad = place
            missing.discard(parameter)
            if not missing:
                for sent in [p.grad for p in parameters] if flat is None else [flat]:
                    dist.all_reduce(sent)
                missing.update(parameters)

        if flat is not None:
            self.buckets.append(flat)
        for parameter, view in zip(parameters, views, strict=True):
            place = None if view is None else view.view(parameter.shape)
            parameter.register_post_accumulate_grad_hook(lambda p, place=place: arrived(p, place))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._shares_buffers and self._is_due:
            self._share_buffers()
        self._is_due = torch.is_grad_enabled() and self.require_backward_grad_sync
        return self.module(*args, **kwargs)

    @torch.no_grad()
    def _share_buffers(self) -> None:
        """One message for each dtype; buffers of more than torch's 250 MiB would take several."""
        buffers = sorted((b for b in self.module.buffers() if b.numel()), key=lambda b: str(b.dtype))
        for _, same in groupby(buffers, key=lambda b: b.dtype):
            together = [*same]
            flat = torch.cat([buffer.flatten() for buffer in together])
            dist.broadcast(flat, 0)
            for buffer, part in zip(together, flat.split([b.numel() for b in together]), strict=True):
                take(buffer, part.view(buffer.shape))


class WithoutBuckets(FakeDataParallel):
    """Gradients lie where autograd puts them."""

    in_buckets = False

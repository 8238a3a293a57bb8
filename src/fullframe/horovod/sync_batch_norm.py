"""Batch norm with the statistics of all ranks' batches."""

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from fullframe.horovod.queries import size
from fullframe.horovod.reductions import allreduce
from fullframe.horovod.request import ReduceOp


class SyncBatchNorm(_BatchNorm):
    """Batch norm of (N, C, ...) with mean and variance over all ranks, which may have different N; CPU and GPU."""

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")

    def forward(self, input: Tensor) -> Tensor:
        """(N, C, ...) normalized; updates the running statistics where the module trains and has any."""
        self._check_input_dim(input)
        if not self.training and self.running_mean is not None:
            return F.batch_norm(
                input, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps
            )
        if size() == 1:
            return super().forward(input)
        wide = input if input.dtype == torch.float64 else input.float()
        dims = [dim for dim in range(input.dim()) if dim != 1]
        count = wide.new_full((1,), input.numel() // input.shape[1])
        sums = allreduce(torch.cat([wide.sum(dims), count]), op=ReduceOp.Sum)  # (C + 1,)
        total = sums[-1].detach()
        if self.training and total < 2:
            raise ValueError("Expected more than 1 value per channel when training, over all ranks")
        shape = [1, -1] + [1] * (input.dim() - 2)
        mean = sums[:-1] / total
        centered = wide - mean.view(shape)
        var = allreduce((centered * centered).sum(dims), op=ReduceOp.Sum) / total  # (C,)
        if self.training and self.track_running_stats and self.running_mean is not None:
            self._update(mean.detach(), var.detach() * (total / (total - 1)))
        out = centered * torch.rsqrt(var + self.eps).view(shape)
        if self.weight is not None:
            out = out * self.weight.view(shape) + self.bias.view(shape)
        return out.to(input.dtype)

    @torch.no_grad()
    def _update(self, mean: Tensor, var: Tensor) -> None:
        assert self.running_mean is not None and self.running_var is not None
        momentum = self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if momentum is None:  # a plain mean over all batches
                momentum = 1.0 / float(self.num_batches_tracked)
        assert momentum is not None
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
        self.running_var.lerp_(var.to(self.running_var.dtype), momentum)

"""Kernels that CUDA has and the CPU has not, in plain torch on CPU tensors: fused recurrent cells, norms over ranks."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.spatial.rules.test_norm_kernels import KERNELS


def _biased(gates: Tensor, bias: Tensor | None) -> Tensor:
    return gates if bias is None else gates + bias


def lstm(of_input: Tensor, of_hidden: Tensor, cx: Tensor, bias: Any = None, bias2: Any = None) -> tuple[Tensor, ...]:
    """Hidden state, cell state, and what backward needs."""
    i, f, g, o = (_biased(of_input, bias) + _biased(of_hidden, bias2)).chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    cy = f * cx + i * g
    return o * cy.tanh(), cy, torch.cat([i, f, g, o], 1)


def lstm_backward(by_hy: Any, by_cy: Any, cx: Tensor, cy: Tensor, kept: Tensor, has_bias: bool) -> tuple[Any, ...]:
    """Gradients of the gates, of the cell state and of the bias."""
    i, f, g, o = kept.chunk(4, 1)
    by_hy = torch.zeros_like(cy) if by_hy is None else by_hy
    by_o, by_c = by_hy * cy.tanh(), by_hy * o * (1 - cy.tanh() ** 2)
    by_c = by_c if by_cy is None else by_c + by_cy
    slopes = (by_c * g * i * (1 - i), by_c * cx * f * (1 - f), by_c * i * (1 - g * g), by_o * o * (1 - o))
    gates = torch.cat(slopes, 1)
    return gates, by_c * f, gates.sum(0) if has_bias else None


def gru(of_input: Tensor, of_hidden: Tensor, hx: Tensor, bias: Any = None, bias2: Any = None) -> tuple[Tensor, Tensor]:
    """Hidden state, and what backward needs."""
    (ri, zi, ni), (rh, zh, nh) = (_biased(*t).chunk(3, 1) for t in ((of_input, bias), (of_hidden, bias2)))
    r, z = (ri + rh).sigmoid(), (zi + zh).sigmoid()
    n = (ni + r * nh).tanh()
    return n + z * (hx - n), torch.cat([r, z, n, nh, hx], 1)


def gru_backward(by_hy: Tensor, kept: Tensor, has_bias: bool) -> tuple[Any, ...]:
    """Gradients of both sorts of gates, of the hidden state, and of both biases."""
    r, z, n, nh, hx = kept.chunk(5, 1)
    by_z, by_n = by_hy * (hx - n) * z * (1 - z), by_hy * (1 - z) * (1 - n * n)
    by_r = by_n * nh * r * (1 - r)
    of_input, of_hidden = torch.cat([by_r, by_z, by_n], 1), torch.cat([by_r, by_z, by_n * r], 1)
    return of_input, of_hidden, by_hy * z, *((of_input.sum(0), of_hidden.sum(0)) if has_bias else (None, None))


STAND_INS: dict[str, Callable[..., Any]] = {
    **KERNELS,
    "_thnn_fused_lstm_cell": lstm,
    "_thnn_fused_lstm_cell_backward_impl": lstm_backward,
    "_thnn_fused_gru_cell": gru,
    "_thnn_fused_gru_cell_backward": gru_backward,
}

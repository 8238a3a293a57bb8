"""What is known of an aten op before it runs."""

from typing import Any

import pytest
import torch

from fullframe.simulation.clock.ops import Op, bytes_of, is_channels_last, is_depthwise, tensors

aten = torch.ops.aten


def counted(func: Any, *args: Any) -> float:
    operations = Op.of(func).operations
    assert operations is not None
    return operations(func, args, {}, func(*args))


@pytest.mark.parametrize(
    ("func", "kind"),
    [
        (aten.addmm.default, "matmul"),
        (aten.convolution_backward.default, "convolution"),
        (aten._scaled_dot_product_flash_attention_for_cpu.default, "attention"),
        (aten._foreach_add_.Scalar, "optimizer"),
        (aten.relu.default, "memory"),
    ],
)
def test_kinds(func: Any, kind: str) -> None:
    assert Op.of(func).kind == kind


def test_what_costs_nothing_and_what_is_read_back() -> None:
    assert Op.of(aten.view.default).free and Op.of(aten.empty.memory_format).free
    assert not Op.of(aten.add.Tensor).free and not Op.of(aten.add_.Tensor).free
    assert Op.of(aten._local_scalar_dense.default).reads_back
    assert not Op.of(aten.add.Tensor).reads_back


def test_what_is_written() -> None:
    add, copy = Op.of(aten.add_.Tensor), Op.of(aten.copy_.default)
    assert not add.gives_new and not add.only_writes and copy.only_writes
    assert Op.of(aten.add.Tensor).gives_new
    a, b = torch.zeros(2), torch.ones(2)
    assert [t is a for t in add.written((a, b), {})] == [True]
    assert [t is a for t in add.written((), {"self": a, "other": b})] == [True]
    many = Op.of(aten._foreach_add_.Scalar)
    assert len(list(many.written(([a, b], 1), {}))) == 2


def test_operations_by_hand() -> None:
    """Two a product: of M x K by K x N, of each output pixel with a filter, of each input pixel of a transposed one."""
    x, w = torch.zeros(2, 4, 9, 9), torch.zeros(6, 4, 3, 3)
    plain = [1, 1], [1, 1], [1, 1]
    forward = counted(aten.convolution.default, x, w, None, *plain, False, [0, 0], 1)
    assert forward == 2 * (2 * 6 * 9 * 9) * (4 * 3 * 3)
    up = torch.zeros(4, 6, 3, 3)
    assert counted(aten.convolution.default, x, up, None, *plain, True, [0, 0], 1) == 2 * (2 * 4 * 9 * 9) * (6 * 3 * 3)
    y = torch.zeros(2, 6, 9, 9)
    for wanted, share in (([True, True, False], 2), ([False, True, False], 1)):
        backward = counted(aten.convolution_backward.default, y, x, w, None, *plain, False, [0, 0], 1, wanted)
        assert backward == share * forward
    assert counted(aten.mm.default, torch.zeros(3, 5), torch.zeros(5, 7)) == 2 * 3 * 5 * 7
    assert counted(aten.mv.default, torch.zeros(3, 5), torch.zeros(5)) == 2 * 3 * 5
    assert Op.of(aten.relu.default).operations is None
    q = torch.zeros(2, 3, 8, 16)
    assert counted(aten._scaled_dot_product_flash_attention_for_cpu.default, q, q, q) == 4 * (2 * 3 * 8 * 16) * 8


def test_one_channel_a_group_is_depthwise() -> None:
    forward, backward = Op.of(aten.convolution.default), Op.of(aten.convolution_backward.default)
    deep, full, single = torch.zeros(4, 1, 3, 3), torch.zeros(4, 4, 3, 3), torch.zeros(1, 1, 3, 3)
    x = torch.zeros(1, 4, 8, 8)
    assert is_depthwise(forward, (x, deep)) and is_depthwise(backward, (x, x, deep))
    assert not is_depthwise(forward, (x, full)) and not is_depthwise(forward, (x, single))
    assert not is_depthwise(backward, (x, deep, full))


def test_bytes_are_counted_once() -> None:
    a = torch.zeros(3, 4)
    assert bytes_of(a) == 48
    assert bytes_of(a[:, :1].expand(3, 100)) == 12
    assert bytes_of(torch.zeros(0, 4).expand(0, 4)) == 0
    assert bytes_of(torch.zeros(1, dtype=torch.float64).expand(5, 7)) == 8
    assert [t.shape[0] for t in tensors([a, (a, [a, 3]), None])] == [3, 3, 3]


def test_which_maps_have_their_channels_last() -> None:
    x = torch.zeros(2, 8, 10, 10)
    assert is_channels_last(x, x.to(memory_format=torch.channels_last))
    assert not is_channels_last(x, torch.zeros(3))
    assert not is_channels_last(torch.zeros(2, 1, 10, 10).to(memory_format=torch.channels_last))  # both at once
    one = torch.zeros(1, 10, 10, 8).permute(0, 3, 1, 2)
    assert is_channels_last(one)
    assert not is_channels_last(one.as_strided(one.shape, (8, *one.stride()[1:])))  # a row's stride of a size of 1

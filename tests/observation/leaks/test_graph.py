"""What is read of an autograd graph."""

import torch

from fullframe.observation.leaks.graph import next_number, nodes_since, oldest_node, saved_tensors


def test_how_far_back_a_graph_reaches() -> None:
    weight = torch.ones(3, requires_grad=True)
    marks, total = [], torch.zeros(())
    for _ in range(5):
        marks.append(next_number())
        total = total + (weight * 2).sum()
    now = next_number()
    assert marks[0] <= oldest_node(total.grad_fn, now) < marks[1], "the first step's nodes, through all others"
    fresh = (weight * 2).sum()
    assert oldest_node(fresh.grad_fn, next_number()) >= now
    assert len(nodes_since(total.grad_fn, marks[4])) == 3  # mul, sum, add of the last step
    assert len(nodes_since(total.grad_fn, marks[0])) == 15


def test_what_a_node_keeps_until_backward() -> None:
    weight = torch.ones(3, requires_grad=True)
    exp = (weight * 2).exp()
    total = exp.sum()
    assert [tensor.data_ptr() for tensor in saved_tensors(exp.grad_fn)] == [exp.data_ptr()]
    total.backward()
    assert list(saved_tensors(exp.grad_fn)) == []

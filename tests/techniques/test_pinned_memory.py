"""Pieces of slabs: no two of them share a byte, and what is returned serves again. Nothing is pinned on this CPU."""

import random

import torch
from torch import Tensor

from fullframe.techniques.pinned_memory import PinnedMemory

KIB = 1024


def test_pieces_keep_apart_and_are_used_again() -> None:
    draw, memory = random.Random(0), PinnedMemory(pin=False, slab_bytes=64 * KIB)
    held: list[tuple[Tensor, int]] = []
    for number in range(2000):
        if held and (len(held) > 12 or draw.random() < 0.4):
            held.pop(draw.randrange(len(held)))
        piece = memory.take(draw.choice([1, 100, 512, 3000, 9000]))
        piece.fill_(number % 251)
        held.append((piece, number % 251))
        assert all(bool((piece == value).all()) for piece, value in held)
    assert memory.nbytes <= 4 * 64 * KIB  # at most 13 * 9000 bytes were held at once


def test_neighbours_become_one() -> None:
    memory = PinnedMemory(pin=False, slab_bytes=4 * KIB)
    pieces = [memory.take(KIB) for _ in range(4)]
    assert memory.nbytes == 4 * KIB
    del pieces[1:3]
    assert memory.take(2 * KIB).data_ptr() == pieces[0].data_ptr() + KIB
    assert memory.nbytes == 4 * KIB


def test_what_no_slab_holds_gets_one_of_its_size() -> None:
    memory = PinnedMemory(pin=False, slab_bytes=KIB)
    with torch.device("meta"):
        piece = memory.take(10 * KIB)
    assert piece.numel() == 10 * KIB and piece.is_cpu, "whatever the default device is"
    assert memory.nbytes == 10 * KIB
    assert memory.take(0).numel() == 0

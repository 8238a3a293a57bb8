"""A manifest comes back as it was, and tells where each part of a tensor lies."""

import json

import pytest
import torch

from fullframe.errors import CheckpointError
from fullframe.training.checkpoints.manifest import Chunk, Manifest, StoredTensor, key_in_file
from fullframe.training.checkpoints.safetensors_files import DTYPES, FileRecord

# A (4, 6) tensor in two chunks:   columns 0:4 in rank-0, 4:6 in rank-1
HALVES = (Chunk((0, 0), (4, 4), "rank-0.safetensors"), Chunk((0, 4), (4, 2), "rank-1.safetensors"))
FILES = {f"rank-{rank}.safetensors": FileRecord(size_bytes=8 * rank, blake2b="ab") for rank in (0, 1)}


def manifest(tensors, files=FILES):
    return Manifest(step=3, facts={"lr": [0.1, None, "x"]}, tensors=tensors, files=files)


def test_it_comes_back():
    tensors = {str(dtype): StoredTensor(dtype, (4, 6), HALVES) for dtype in DTYPES}
    tensors["number"] = StoredTensor(torch.int64, (), (Chunk((), (), "rank-1.safetensors"),))
    assert Manifest.from_json(manifest(tensors).to_json()) == manifest(tensors)


def test_a_chunk_is_named_by_its_box_unless_it_is_the_whole():
    split = StoredTensor(torch.float32, (4, 6), HALVES)
    assert [key_in_file("w", split, chunk) for chunk in HALVES] == ["w[0:4,0:4]", "w[0:4,4:6]"]
    assert key_in_file("w", split, Chunk((0, 0), (4, 6), "rank-0.safetensors")) == "w"
    number = StoredTensor(torch.float32, (), ())
    assert key_in_file("step", number, Chunk((), (), "rank-0.safetensors")) == "step"


@pytest.mark.parametrize("file", ["rank-2.safetensors", "../rank-0.safetensors", "other.pt"])
def test_a_chunk_lies_in_a_file_of_the_checkpoint(file):
    text = manifest({"w": StoredTensor(torch.float32, (2,), (Chunk((0,), (2,), file),))}).to_json()
    with pytest.raises(CheckpointError, match=r"manifest.json does not describe a checkpoint: files \["):
        Manifest.from_json(text)


def test_another_number_is_noticed():
    whole = json.loads(manifest({}).to_json())
    whole["checkpoint"]["step"] = 4
    with pytest.raises(CheckpointError, match=r"wrong checksum of manifest\.json"):
        Manifest.from_json(json.dumps(whole))

"""What is written, safetensors' own reader reads; the record is that of the bytes on the disk."""

import hashlib
import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from fullframe.training.checkpoints.safetensors_files import DTYPES, FileRecord, Shape, record_of, write_tensors


def written(path, tensors, metadata=None):
    shapes = {name: Shape(t.dtype, tuple(t.shape)) for name, t in tensors.items()}
    return write_tensors(path, shapes, lambda name: tensors[name], metadata)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_comes_back(tmp_path, dtype):
    values = {"a": torch.tensor([0.0, 1.0, 1.0]).to(dtype), "none": torch.zeros(0, 4).to(dtype)}
    written(tmp_path / "x", values | {"odd": torch.ones(3, dtype=torch.uint8)})
    found = load_file(tmp_path / "x")
    for name, value in values.items():
        assert found[name].dtype == dtype and found[name].shape == value.shape
        assert torch.equal(found[name].view(torch.uint8), value.view(torch.uint8))


def test_any_strides_and_a_number_come_back(tmp_path):
    image = torch.rand(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    tensors = {"image": image, "matrix": torch.rand(3, 5).t(), "number": torch.tensor(7), "rows": torch.rand(6, 2)[::2]}
    tensors |= {"one": torch.rand(1, 5)[:, 0], "none": torch.from_numpy(np.zeros((0, 5))[:, 0])}
    written(tmp_path / "x", tensors, {"format": "pt"})
    found = load_file(tmp_path / "x")
    assert all(torch.equal(found[name], value) for name, value in tensors.items()) and found.keys() == tensors.keys()


def test_each_tensor_starts_at_a_multiple_of_its_element_size(tmp_path):
    tensors = {"a": torch.ones(3, dtype=torch.uint8), "b": torch.ones(1, dtype=torch.float64), "c": torch.ones(1)}
    written(tmp_path / "x", tensors)
    contents = (tmp_path / "x").read_bytes()
    length = int.from_bytes(contents[:8], "little")
    header = json.loads(contents[8 : 8 + length])
    for name, tensor in tensors.items():
        assert (8 + length + header[name]["data_offsets"][0]) % tensor.element_size() == 0


def test_the_record_is_that_of_the_bytes_on_the_disk(tmp_path):
    record = written(tmp_path / "x", {"a": torch.rand(5000, 1000)})  # 20 MB, written in two pieces
    contents = (tmp_path / "x").read_bytes()
    assert record == FileRecord(size_bytes=len(contents), blake2b=hashlib.blake2b(contents, digest_size=16).hexdigest())
    assert record == record_of(tmp_path / "x")

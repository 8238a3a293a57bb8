"""A checkpoint is checked before a byte of it is believed, and runs no code."""

import os
import pickle
from collections import OrderedDict

import pytest
import torch
from torch import nn

from fullframe.errors import CheckpointError
from fullframe.training.checkpoints.manifest import MANIFEST, Manifest, read_manifest
from fullframe.training.checkpoints.safetensors_files import record_of
from fullframe.training.checkpoints.writer import Checkpoints, newest_checkpoint
from tests.rank_group import rank_group
from tests.training.checkpoints.states import (
    assert_equal,
    damage,
    names_in,
    restored,
    state_at,
    values_of,
    write,
)

KINDS = {
    "an empty file": "rank-0.safetensors has 0 of ",
    "a file cut off": "rank-0.safetensors has ",
    "a file gone": "rank-0.safetensors: No such file or directory",
    "another file": "rank-0.safetensors has 6000 of ",
    "one bit of a weight": "wrong checksum of rank-0.safetensors",
    "one bit of a name": "wrong checksum of rank-0.safetensors",
    "a file too long": "rank-0.safetensors has ",
    "no manifest": "it has no manifest.json",
    "an empty manifest": "manifest.json is damaged: JSONDecodeError",
    "a manifest cut off": "manifest.json is damaged: JSONDecodeError",
    "another number in the manifest": "wrong checksum of manifest.json",
    "another manifest": "manifest.json is damaged: TypeError",
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_checkpoint_is_named_and_the_one_before_taken(tmp_path, kind):
    for step in (1, 2):
        write(state_at(step), tmp_path)
    damage(tmp_path / "step-00000002", kind)
    newest, problems = newest_checkpoint(tmp_path)
    assert newest.manifest.step == 1
    assert len(problems) == 1 and f"{tmp_path}/step-00000002 is unreadable (" in problems[0]
    assert KINDS[kind] in problems[0]


def written_by_ranks(folder):
    return write(state_at(1, model=nn.Linear(50, 50)), folder)


def test_one_process_checks_the_files_of_all_ranks(tmp_path):
    path, _ = rank_group(2).run(written_by_ranks, tmp_path)
    file = path / "rank-1.safetensors"
    contents = bytearray(file.read_bytes())
    contents[-1] ^= 1
    file.write_bytes(contents)
    with pytest.raises(CheckpointError, match=r"wrong checksum of rank-1\.safetensors"):
        newest_checkpoint(tmp_path)


def test_a_damaged_checkpoint_does_not_count_as_one_of_the_newest(tmp_path):
    for step in (1, 5):
        write(state_at(step), tmp_path)
    damage(tmp_path / "step-00000005", "a file cut off")
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.forget_after(newest_checkpoint(tmp_path)[0].manifest.step)
        checkpoints.save(state_at(2))
        checkpoints.wait()
        assert names_in(tmp_path) == ["step-00000002", "step-00000005.damaged"]
        checkpoints.save(state_at(5))
    assert names_in(tmp_path) == ["step-00000005"]
    assert newest_checkpoint(tmp_path)[1] == []


def test_a_checkpoint_of_the_same_step_is_replaced(tmp_path):
    write(state_at(1, seed=0), tmp_path)
    write(state_at(1, seed=1), tmp_path)
    fresh = state_at()
    restored(tmp_path, fresh)
    assert_equal(values_of(fresh), values_of(state_at(1, seed=1)))
    assert names_in(tmp_path) == ["step-00000001"]


def test_no_checkpoint_at_all(tmp_path):
    assert newest_checkpoint(tmp_path) == (None, [])
    assert newest_checkpoint(tmp_path / "nowhere") == (None, [])
    (tmp_path / "step-00000001.partial").mkdir()
    assert newest_checkpoint(tmp_path) == (None, [])


def test_another_format_is_named(tmp_path):
    path = write(state_at(4), tmp_path)
    (path / MANIFEST).write_text((path / MANIFEST).read_text().replace("checkpoint 2", "checkpoint 9"))
    with pytest.raises(CheckpointError, match="format is 'fullframe checkpoint 9', this version reads 'fullframe ch"):
        newest_checkpoint(tmp_path)


class Payload:
    """Unpickled, it makes a folder."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def rewritten(path, change):
    """The manifest with right checksums of whatever the files hold now."""
    manifest = read_manifest(path)
    files = {name: record_of(path / name) for name in manifest.files}
    fields = {"step": manifest.step, "facts": manifest.facts, "tensors": manifest.tensors, "files": files}
    (path / MANIFEST).write_text(Manifest(**(fields | change)).to_json())


def test_a_pickle_is_never_loaded(tmp_path):
    marker = tmp_path / "was run"
    payload = pickle.dumps(Payload(marker))
    path = write(state_at(1), tmp_path / "checkpoints")
    file = path / "rank-0.safetensors"
    intact = file.read_bytes()

    (path / ".metadata").write_bytes(payload)  # where torch.distributed.checkpoint keeps one
    restored(tmp_path / "checkpoints", state_at())

    for contents in (payload, OrderedDict(weight=Payload(marker))):
        if isinstance(contents, bytes):
            file.write_bytes(contents)
        else:
            torch.save(contents, file)
        rewritten(path, {})  # by someone who can compute checksums
        with pytest.raises(CheckpointError, match="cannot be read"):
            restored(tmp_path / "checkpoints", state_at())
    file.write_bytes(intact)

    (path / MANIFEST).write_bytes(payload)
    with pytest.raises(CheckpointError, match="is unreadable"):
        newest_checkpoint(tmp_path / "checkpoints")
    assert not marker.exists()
    pickle.loads(payload)
    assert marker.exists(), "the payload works"


def test_a_manifest_leads_to_no_other_folder(tmp_path):
    path = write(state_at(1), tmp_path / "checkpoints")
    (tmp_path / "secret").write_bytes(b"secret")
    rewritten(path, {"files": {"../../secret": record_of(tmp_path / "secret")}})
    with pytest.raises(CheckpointError, match=r"manifest.json does not describe a checkpoint: files \['../../secret'"):
        newest_checkpoint(tmp_path / "checkpoints")

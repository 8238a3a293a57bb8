"""Exported weights are the model's own, whole, whatever the run's sharding; other tools load them."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

import fullframe as ff
from fullframe.cli.application import run
from fullframe.errors import CheckpointError, RunError
from fullframe.techniques.ema import ParameterAverage
from fullframe.training.checkpoints.export import export
from tests.training.checkpoints.states import damage, state_at, train, write
from tests.training.tiny import Network


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.frozen = nn.Linear(3, 3, dtype=torch.bfloat16).requires_grad_(False)
        self.register_buffer("count", torch.tensor(5))


@pytest.mark.parametrize("make", [Network, Tied])
def test_a_plain_model_loads_it(tmp_path, make):
    model = make()
    state = train(state_at(model=model, average=ParameterAverage(model, 0.5)), 3)
    write(state, tmp_path / "run" / "checkpoints")
    exported = export(tmp_path / "run", tmp_path / "model.safetensors")
    (said,) = exported.problems
    assert "these are the last values; evaluations are of the moving averages, which --average" in said
    found = load_file(exported.path)
    assert found.keys() == model.state_dict().keys()
    for name, value in model.state_dict().items():
        assert found[name].dtype == value.dtype and torch.equal(found[name], value), name
    other = make()
    other.load_state_dict(found)

    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt", "step": "3", "fullframe": ff.__version__}

    assert not export(tmp_path / "run", tmp_path / "average.safetensors", average=True).problems
    with state.average.applied():
        expected = {name: value.clone() for name, value in model.state_dict().items()}
    found = load_file(tmp_path / "average.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)
    changed = [name for name, p in model.named_parameters() if not torch.equal(found[name], p)]
    assert changed == [name for name, p in model.named_parameters() if p.requires_grad]


def test_the_command(tmp_path, capsys):
    write(train(state_at(), 2), tmp_path / "checkpoints")
    assert run(["export", str(tmp_path), "--out", str(tmp_path / "m.safetensors"), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["step"], said["tensors"]) == (2, len(Network().state_dict()))
    assert said["size_bytes"] == (tmp_path / "m.safetensors").stat().st_size
    write(train(state_at(), 3), tmp_path / "checkpoints")
    damage(tmp_path / "checkpoints" / "step-00000003", "one bit of a weight")
    again = ["export", str(tmp_path), "--out", str(tmp_path / "m.safetensors")]
    before = (tmp_path / "m.safetensors").stat().st_mtime_ns
    assert run(again) == 2 and (tmp_path / "m.safetensors").stat().st_mtime_ns == before
    assert f"{tmp_path}/m.safetensors is there already; name another file, or" in capsys.readouterr().err
    assert run([*again, "--overwrite"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith(f"wrote {tmp_path}/m.safetensors: ") and out.endswith(", after step 2\n")
    assert err.startswith(f"warning: {tmp_path}/checkpoints/step-00000003 is unreadable (rank 0: wrong checksum of")
    older = ["export", str(tmp_path), "--out", str(tmp_path / "older.safetensors"), "--json", "--step"]
    assert run([*older, "2"]) == 0 and json.loads(capsys.readouterr().out)["step"] == 2
    assert run([*older, "3", "--overwrite"]) == 2 and "take another step's" in capsys.readouterr().err
    assert run([*older, "7", "--overwrite"]) == 2
    assert "holds no checkpoint after step 7, but after 2, 3" in capsys.readouterr().err
    assert run(["export", str(tmp_path), "--out", str(tmp_path), "--overwrite"]) == 2
    assert "it is a folder; name a file" in capsys.readouterr().err
    assert run(["export", str(tmp_path), "--out", str(tmp_path / "a.safetensors"), "--average"]) == 2
    assert "holds no average of the parameters; train with --ema-decay" in capsys.readouterr().err


def test_refusals(tmp_path):
    with pytest.raises(RunError, match="holds no checkpoint; give the --run-dir of a run that has"):
        export(tmp_path, tmp_path / "model.safetensors")
    write(state_at(1), tmp_path / "checkpoints")
    with pytest.raises(CheckpointError, match=r"cannot write .*/nowhere/model.safetensors: No such file or directory"):
        export(tmp_path, tmp_path / "nowhere" / "model.safetensors")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints"]

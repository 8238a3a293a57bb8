"""A loss that is not finite: nothing changes, it is counted, and the first module it came from is named."""

import json

import pytest
import torch
from torch import nn

import fullframe as ff
from fullframe.errors import RunError
from fullframe.techniques.precision import LossScale
from tests.rank_group import rank_group
from tests.training.tiny import Frames, Network, loss, recipe


class Fragile(Network):
    """A layer whose output is not finite from the n-th forward pass on, on the rank that holds the last column."""

    def __init__(self, last=3):
        super().__init__()
        self.layer, self.last = nn.Identity(), last
        self.calls = 0
        self.layer.register_forward_hook(self.spoil)

    def spoil(self, layer, inputs, output):
        self.calls += 1
        return output / output.new_zeros(()) if self.calls > self.last else output

    def forward(self, image):
        return super().forward(self.layer(image))


def failed(strategy, run_dir, model=Fragile, **options):
    messages = []
    with pytest.raises(RunError) as error:
        ff.fit(
            recipe(model=model),
            strategy,
            run_dir,
            on_message=messages.append,
            **{"steps": 9, "max_skipped": 2, **options},
        )
    return str(error.value), messages


def test_the_first_module_is_named(tmp_path):
    text, messages = failed(ff.Strategy(), tmp_path / "alone")
    assert text.startswith(
        "2 steps in a row were skipped up to step 5; the first that is not finite is the output of module "
        "layer (Identity) on rank 0. Lower the learning rate"
    )
    told, _ = failed(ff.Strategy(), tmp_path / "one", max_skipped=1)
    assert told.startswith("step 4 was skipped; the first that")
    assert [message[:14] for message in messages] == ["step 4 skipped", "step 5 skipped"]
    lines = [json.loads(line) for line in (tmp_path / "alone" / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["skipped"]) for line in lines[2:]] == [(3, False), (4, True), (5, True)]
    assert json.loads((tmp_path / "alone" / "run.json").read_text())["step"] == 5
    for text, _ in rank_group(2).run(failed, ff.Strategy(width=2), tmp_path / "split"):
        assert "the output of module layer (Identity) on rank 0, 1." in text


def test_a_run_that_trained_nothing_fails(tmp_path):
    with pytest.raises(RunError, match=r"every step of the run was skipped; the first .* or mend the data$"):
        ff.fit(recipe(data=Sick), ff.Strategy(), tmp_path, steps=2)


class Sick(Frames):
    def __getitem__(self, index):
        sample = super().__getitem__(index)
        return sample | {"image": torch.full_like(sample["image"], torch.inf)}


class LastOfFour(Frames):
    """One sample is not finite: in the first batch, on the last replica."""

    def __getitem__(self, index):
        sample = super().__getitem__(index)
        return {**sample, "image": sample["image"] / 0.0} if index == 3 else sample


def failed_on_one_replica(run_dir):
    with pytest.raises(RunError) as error:
        job = recipe(data=LastOfFour, model=Network, sampler=lambda data: range(len(data)))
        ff.fit(job, ff.Strategy(data=2), run_dir, max_skipped=1)
    return str(error.value)


def test_what_one_rank_alone_has_met_is_named_on_all(tmp_path):
    for text in rank_group(2).run(failed_on_one_replica, tmp_path):
        assert "is the output of module body.0 (Conv2d) on rank 1; the batch's ['image'] is not finite either." in text


def penalized(model, batch):
    image = batch["image"].detach().requires_grad_()
    (slope,) = torch.autograd.grad(model(image).square().sum(), image, create_graph=True)
    return loss(model, batch) if slope.isnan().all() else slope.square().mean()


def test_a_loss_that_asks_for_gradients(tmp_path):
    with pytest.raises(
        RunError, match=r"every step of the run was skipped; the first that is not finite is the output"
    ):
        ff.fit(recipe(data=Sick, loss=penalized), ff.Strategy(), tmp_path, steps=2)


class Exploding(Network):
    """Finite forwards, no finite gradient."""

    def forward(self, image):
        output = super().forward(image)
        return output + (output * 0).sqrt()


def test_the_batch_a_parameter_and_a_gradient_are_named(tmp_path):
    def error_of(**changes):
        with pytest.raises(RunError) as error:
            ff.fit(recipe(**changes), ff.Strategy(), tmp_path / str(len(list(tmp_path.iterdir()))), max_skipped=1)
        return str(error.value)

    text = error_of(data=Sick, model=Network)
    assert "is the output of module body.0 (Conv2d) on rank 0; the batch's ['image'] is not finite either" in text
    assert "the first that is not finite is the gradient of body.0.weight on rank 0" in error_of(model=Exploding)

    def spoilt():
        model = Network()
        nn.init.constant_(model.head[1].bias, torch.nan)
        return model

    assert "the first that is not finite is parameter head.1.bias on rank 0" in error_of(model=spoilt)
    text = error_of(loss=lambda model, batch: loss(model, batch)[0] * torch.nan, model=Network)
    assert "every parameter, module output and gradient is finite" not in text  # the gradient is not
    assert "the gradient of body.0.weight" in text


class Spectral(Network):
    """A filter of complex weights on the frequencies."""

    def __init__(self):
        super().__init__()
        self.filter = nn.Parameter(torch.full((1, 1, 1), complex(1, torch.nan)))

    def forward(self, image):
        return super().forward(torch.fft.ifft2(torch.fft.fft2(image) * self.filter).real)


def test_a_complex_parameter_is_named(tmp_path):
    with pytest.raises(RunError, match="the first that is not finite is parameter filter on rank 0"):
        ff.fit(recipe(model=Spectral), ff.Strategy(), tmp_path, max_skipped=1)


def test_a_skipped_step_changes_nothing():
    torch.manual_seed(0)
    model = Network()
    step = ff.TrainStep(model, loss, torch.optim.AdamW(model.parameters(), weight_decay=1.0), ff.Strategy())
    batch = {name: torch.stack([Frames()[i][name] for i in range(4)]) for name in ("image", "target")}
    step(batch)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert step(batch | {"image": batch["image"] * torch.nan}).skipped
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert not step(batch).skipped
    assert not torch.equal(model.body[1].running_mean, before["body.1.running_mean"])


def test_only_skips_in_a_row_count(tmp_path):
    calls = []

    def every_other(model, batch):
        calls.append(1)
        total, count = loss(model, batch)
        return total * (torch.nan if len(calls) % 2 else 1.0), count

    ff.fit(recipe(loss=every_other), ff.Strategy(), tmp_path, steps=8, max_skipped=2)


def steep(model, batch):
    """A gradient that overflows fp16 until the scale has fallen eight times."""
    values = model(batch["image"])
    return values.float().mean() * 2.0**8


def test_a_falling_scale_is_not_a_failure(tmp_path):
    messages = []
    job = recipe(
        model=lambda: nn.Conv2d(3, 4, 1), data=lambda: Frames(dtype=torch.float32), loss=steep, schedule=lambda n: 1e-6
    )
    ff.fit(job, ff.Strategy(precision="fp16"), tmp_path, steps=20, max_skipped=1, on_message=messages.append)
    assert sum("skipped" in message for message in messages) > 1


@pytest.mark.parametrize("count", [0, torch.inf, torch.nan])
def test_a_step_in_which_nothing_counts_does_not_start_the_scale(count):
    scale = LossScale()
    assert scale.start(count) == scale.start(1024) == 2.0**16, "of all microbatches of the step alike"
    scale.update(overflowed=True, counted=False)
    assert scale.value == 2.0**16 and not scale.started
    assert scale.start(1024) == 2.0**6
    scale.update(overflowed=True, counted=True)
    scale.update(overflowed=False, counted=False)
    assert scale.value == 2.0**5 and scale.started


def test_the_scale_falls_to_the_mean():
    scale = LossScale()
    assert not scale.falling
    scale.start(1000)
    for _ in range(16):
        assert scale.falling
        scale.update(overflowed=True)
    assert scale.value == 1 / 1024 and not scale.falling

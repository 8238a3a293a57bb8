"""What a recipe and a strategy make together is complete, and follows from the seed."""

import dataclasses

import pytest
import torch

import fullframe as ff
from fullframe.errors import RecipeError
from fullframe.training.session import assemble
from tests.training.tiny import Frames, recipe


def test_a_session_is_complete() -> None:
    strategy = ff.Strategy(precision="fp16", ema_decay=0.5, optimizer="adamw")
    session = assemble(recipe(), strategy, ff.init_mesh())
    state = session.state
    assert state.scale is session.step.scale is not None
    assert state.average is session.step.average is not None
    assert isinstance(state.optimizer, torch.optim.AdamW)
    updated = {id(p) for group in state.optimizer.param_groups for p in group["params"]}
    assert updated == {id(p) for p in state.model.parameters()} == {id(p) for p in session.model.parameters()}
    assert state.step == 0 and state.mesh == (1, 1, 1)


def test_values_follow_from_the_recipes_seed() -> None:
    torch.manual_seed(7)
    first = assemble(recipe(), ff.Strategy(), ff.init_mesh()).state.model.state_dict()
    torch.manual_seed(8)
    second = assemble(recipe(), ff.Strategy(), ff.init_mesh()).state.model.state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_data_without_samples_is_refused() -> None:
    empty = dataclasses.replace(recipe(), data=lambda: [])
    with pytest.raises(RecipeError, match=r"recipe\.data\(\) has no samples"):
        assemble(empty, ff.Strategy(), ff.init_mesh())


def test_a_sampler_says_what_an_epoch_has() -> None:
    def last(data: Frames) -> list[int]:
        return [len(data) - 1] * 4 + [0] * 5

    loader = assemble(recipe(sampler=last), ff.Strategy(), ff.init_mesh()).state.loader
    assert [set(batch["name"]) for batch in loader] == [{f"frame {len(Frames()) - 1}"}, {"frame 0"}]
    none = dataclasses.replace(recipe(), sampler=lambda data: None)
    with pytest.raises(RecipeError, match=r"recipe\.sampler\(data\) must give a Sampler or a list, .* got None"):
        assemble(none, ff.Strategy(), ff.init_mesh())


def test_a_scripted_model_is_refused() -> None:
    scripted = dataclasses.replace(recipe(), model=lambda: torch.jit.script(torch.nn.Conv2d(3, 1, 3)))
    with pytest.raises(RecipeError, match="ScriptModule, which takes no hooks"):
        assemble(scripted, ff.Strategy(), ff.init_mesh())


@pytest.mark.parametrize("kind", [torch.nn.Embedding, torch.nn.EmbeddingBag])
def test_sparse_gradients_are_refused_by_name_in_training_and_in_simulation(kind: type[torch.nn.Module]) -> None:
    def model() -> torch.nn.Module:
        return torch.nn.ModuleDict({"table": kind(4, 2, sparse=True)})

    sparse = dataclasses.replace(recipe(), model=model)
    said = rf"{kind.__name__} 'table' gives sparse gradients, .* build it with sparse=False"
    with pytest.raises(RecipeError, match=said):
        assemble(sparse, ff.Strategy(), ff.init_mesh())
    with pytest.raises(RecipeError, match=said):
        ff.simulate(sparse, ff.Strategy(), "cpu")

"""The command line knows every field of Strategy, with its default, and hands it on to the ranks it starts."""

import dataclasses

import tyro

from fullframe.cli.techniques import Techniques
from fullframe.strategy import Strategy

MESH = {"data", "height", "width"}


def test_every_field_of_strategy_is_an_option():
    fields = {field.name: field.default for field in dataclasses.fields(Strategy) if field.name not in MESH}
    assert {field.name: field.default for field in dataclasses.fields(Techniques)} == fields


def test_words_are_parsed_back():
    techniques = Techniques(
        microbatches=3,
        precision="fp16",
        recompute="blocks",
        recompute_modules=("a.*", "b"),
        offload=True,
        clip_norm=0.5,
        ema_decay=0.99,
    )
    config = (tyro.conf.FlagCreatePairsOff,)
    assert tyro.cli(Techniques, args=techniques.words(), config=config) == techniques
    assert Techniques().words() == []
    assert Strategy(**techniques.fields()).recompute_modules == ("a.*", "b")

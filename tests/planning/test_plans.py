"""Plans in a notebook: one table, with nothing in it that the strategies' names could break."""

import re
from html.parser import HTMLParser

import torch
from torch import nn

import fullframe as ff
from fullframe.planning.plans import Plans
from fullframe.planning.ranking import Plan
from fullframe.simulation.prediction import Moment, Prediction

GIB = 2**30


def plan(
    fits: bool = True, reason: str = "the fastest", parameter: int = 2, step_seconds: float = 0.25, **strategy: int
) -> Plan:
    prediction = Prediction(
        peak_bytes=6 * GIB,
        reserved_bytes=7 * GIB,
        bytes={"parameter": parameter * GIB, "activation": 4 * GIB},
        step_seconds=step_seconds,
        seconds={"convolution": 0.25},
        moment=Moment(step=2, phase="backward", module=""),
        largest=(),
        modules={},
        terms={"context": GIB // 2},
        parameters=10,
    )
    return Plan(
        strategy=ff.Strategy(**strategy),  # type: ignore[arg-type]
        prediction=prediction,
        fits=fits,
        reason=reason,
        devices="4xT4 <b>",
        memory_bytes=15 * GIB,
        batch_size=8,
    )


class Balanced(HTMLParser):
    """Fails on a tag that is closed and was not opened; knows the cells of each row."""

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.rows: list[list[str]] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.rows and ("td" in self.open or "th" in self.open):
            self.rows[-1][-1] += data


def shown(plans: Plans) -> str:
    return plans._repr_html_()


def test_a_row_for_each_that_was_simulated() -> None:
    passed_over = Plan(
        strategy=ff.Strategy(height=2), prediction=None, fits=False, reason="slower", devices="4xT4", memory_bytes=1,
        batch_size=8,
    )  # fmt: skip
    plans = Plans([plan(width=4), plan(fits=False, reason="needs <more>", width=2), passed_over])
    text = shown(plans)
    assert "4xT4 &lt;b&gt;" in text and "<b>width 4, fp32</b>" in text and "3 strategies, 2 simulated" in text
    rows = Balanced(text).rows
    assert rows[1] == ["1", "width 4, fp32", "7.50", "", "7.50", "250", "32", "the fastest"]
    assert rows[2] == ["", "width 2, fp32", "7.50", "", "7.50", "250", "32", "needs <more>"] and len(rows) == 3


def test_a_bar_is_as_long_as_its_bytes() -> None:
    widths = dict(re.findall(r'title="(\w+) [\d.]+ GiB" style="width:([\d.]+)%', shown(Plans([plan()]))))
    assert {kind: float(width) for kind, width in widths.items()} == {
        "parameter": round(100 * 2 / 15, 2), "gradient": 0, "optimizer": 0, "activation": round(100 * 4 / 15, 2),
        "other": round(100 * 1.5 / 15, 2),
    }  # fmt: skip


def test_large_numbers_are_written_out() -> None:
    assert Balanced(shown(Plans([plan(step_seconds=0.0005)]))).rows[1][5:7] == ["0.5", "16,000"]


def test_where_nothing_fits_it_says_so() -> None:
    assert "<b>none of these fits</b>" in shown(Plans([plan(fits=False)]))
    assert "no plans" in shown(Plans([]))


def test_only_the_first_dozen_is_shown() -> None:
    assert "2 more that were simulated are in the list" in shown(Plans([plan(width=n) for n in range(1, 15)]))


def test_plan_returns_them() -> None:
    recipe = ff.Recipe(
        model=lambda: nn.Conv2d(3, 4, 3, padding=1),
        loss=lambda model, batch: model(batch["image"]).square().mean(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        data=lambda: [],  # type: ignore[arg-type,return-value]
        sample=lambda: {"image": torch.zeros(3, 32, 64)},
        batch_size=2,
    )
    plans = ff.plan(recipe, "2xT4")
    assert isinstance(plans, list) and plans[0].fits
    assert len(Balanced(shown(plans)).rows) > 1

"""Plans as one HTML page that needs no network: bytes by category, and seconds by kind."""

from collections.abc import Sequence
from pathlib import Path

from fullframe.errors import FullframeError
from fullframe.planning.ranking import Plan, by_category
from fullframe.strategy import describe, multiplied
from fullframe.techniques.stages.pipelines import bubble, gpipe, timeline
from fullframe.wording import GIB

_SHOWN = 25
_COLOURS = {
    "parameter": "#4c78a8",
    "gradient": "#72b7b2",
    "optimizer": "#54a24b",
    "activation": "#f58518",
    "temporary": "#ffbf79",
    "communication": "#b279a2",
    "workspace": "#9d755d",
    "unused by the allocator": "#d8d8d8",
    "context": "#bab0ac",
    "matmul": "#4c78a8",
    "convolution": "#f58518",
    "layout": "#ff9da6",
    "attention": "#e45756",
    "memory": "#72b7b2",
    "exchange": "#b279a2",
    "gradients": "#9d755d",
    "offload": "#eeca3b",
    "launch": "#d8d8d8",
}


def draw(plans: Sequence[Plan], title: str, path: Path) -> None:
    """Write the page; raises FullframeError without plotly."""
    try:
        import plotly.graph_objects as go  # type: ignore[import-untyped, unused-ignore]
        from plotly.subplots import make_subplots  # type: ignore[import-untyped, unused-ignore]
    except ImportError as error:
        raise FullframeError("pictures need plotly; pip install 'fullframe[pictures]'") from error
    shown = [plan for plan in plans if plan.prediction is not None][:_SHOWN]
    names = [f"{number}. {describe(plan.strategy)}" for number, plan in enumerate(shown, start=1)]
    figure = make_subplots(1, 2, shared_yaxes=True, subplot_titles=("GiB of a device", "seconds of a step"))
    bytes = [by_category(plan.prediction) for plan in shown if plan.prediction is not None]
    seconds = [plan.prediction.seconds for plan in shown if plan.prediction is not None]
    for column, rows, unit in ((1, bytes, GIB), (2, seconds, 1)):
        for kind in dict.fromkeys(kind for row in rows for kind in row):
            figure.add_trace(
                go.Bar(
                    y=names,
                    x=[row.get(kind, 0) / unit for row in rows],
                    name=kind,
                    orientation="h",
                    marker_color=_COLOURS.get(kind),
                    hovertext=[plan.reason for plan in shown],
                    legendgroup=str(column),
                    legendgrouptitle_text=("bytes", "seconds")[column - 1],
                ),
                row=1,
                col=column,
            )
    if shown:
        figure.add_vline(x=shown[0].memory_bytes / GIB, line_dash="dash", annotation_text="fits", row=1, col=1)
    figure.update_layout(barmode="stack", title=title, template="plotly_white", height=200 + 28 * len(shown))
    figure.update_yaxes(autorange="reversed", automargin=True)
    page = figure.to_html(include_plotlyjs=True)
    staged = next((plan for plan in shown if "stages" in plan.strategy.mesh), None)
    if staged is not None:
        page = page.replace("</body>", f"{_pipeline(staged)}</body>")
    path.write_text(page)


def _pipeline(plan: Plan) -> str:
    """When each stage of a plan works on which microbatch; drawn with backward as twice as long as forward."""
    import plotly.graph_objects as go

    stages, microbatches = plan.strategy.mesh["stages"], plan.strategy.microbatches
    timed = timeline(gpipe, microbatches, [1.0] * stages, [2.0] * stages)
    figure = go.Figure()
    for kind, colour in (("forward", "#4c78a8"), ("backward", "#f58518")):
        found = [each for each in timed if each.action.kind == kind]
        figure.add_trace(
            go.Bar(
                y=[f"stage {each.stage}" for each in found],
                base=[each.start for each in found],
                x=[each.stop - each.start for each in found],
                text=[str(each.action.microbatch) for each in found],
                name=kind,
                orientation="h",
                marker={"color": colour, "line": {"color": "white", "width": 1}},
            )
        )
    title = (
        f"{describe(plan.strategy)}: GPipe's {multiplied({'microbatches': microbatches})} on the stages, which wait "
        f"{bubble(timed):.0%} of the time (the white)"
    )
    figure.update_layout(barmode="overlay", title=title, template="plotly_white", height=200 + 40 * stages)
    figure.update_xaxes(title="forward passes of one microbatch")
    figure.update_yaxes(autorange="reversed")
    return str(figure.to_html(full_html=False, include_plotlyjs=False))

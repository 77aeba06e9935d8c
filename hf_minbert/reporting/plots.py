"""The pictures of a report, as bytes of a PNG. Each shows one thing and has labelled axes.

They are drawn with matplotlib's Figure and the Agg canvas, without pyplot, a screen or personal settings. Colours are
those of Okabe and Ito (https://jfly.uni-koeln.de/color/) and viridis, which people with any colour vision can
distinguish. Lines also have different markers. Sizes are chosen for a phone: 10 points on a width of 4.6 inches.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import MinBertError
from ..evaluation.analysis import Bin, equal_edges
from .differences import only_against

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from .differences import Cells

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
GREY = "#6e7781"
MARKS = "os^Dv<>"
WIDTH, HEIGHT, DPI = 4.6, 3.2, 160
MOST_NAMED = 12  # classes that have their numbers written into a matrix
Points = tuple[Sequence[float], Sequence[float]]


def check_matplotlib() -> None:
    """Raises `MinBertError` if matplotlib is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError as error:
        raise MinBertError(
            "A report is drawn by matplotlib, which is not installed. Install it: pip install 'hf_minbert[report]'"
        ) from error


def drawn(draw: Callable[..., None]) -> Callable[..., bytes]:
    """Converts a function that draws on axes to one that returns the PNG."""

    @wraps(draw)
    def png(*args: Any, **options: Any) -> bytes:
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        style: dict[Any, Any] = {  # whose keys matplotlib lists one by one
            **matplotlib.rcParamsDefault, "backend": matplotlib.rcParams["backend"], "font.size": 10,
            "axes.titlesize": 10, "axes.titlelocation": "left", "axes.spines.top": False, "axes.spines.right": False,
            "axes.grid": True, "grid.color": "#e3e6ea", "axes.axisbelow": True, "legend.frameon": False,
            "legend.fontsize": 9, "text.parse_math": False,  # a $ in a label is a $
        }  # fmt: skip
        with matplotlib.rc_context(style), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Glyph")  # of a script that the font does not have
            figure = Figure(figsize=(WIDTH, HEIGHT), layout="constrained")
            FigureCanvasAgg(figure)
            draw(figure.subplots(), *args, **options)
            buffer = io.BytesIO()
            figure.savefig(buffer, format="png", dpi=DPI)
        return buffer.getvalue()

    return png


def _legend(axes: Axes, entries: int) -> None:
    """Draws the legend above the axes, where it hides nothing."""
    if entries > 1:
        columns = entries if entries <= 3 else 2
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=columns, handlelength=1.4, columnspacing=1)


@drawn
def curves(
    axes: Axes,
    lines: Mapping[str, Points],
    xlabel: str,
    ylabel: str,
    *,
    dashed: Mapping[str, Points] | None = None,
    level: tuple[str, float] | None = None,
    boundaries: Sequence[float] = (),
) -> None:
    """Draws values over steps, one line for each name.

    Args:
        dashed: further lines, dashed, in the colours of `lines`.
        level: the name and height of a horizontal line.
        boundaries: steps at which a new stage began.
    """
    for place, (name, (x, y)) in enumerate(lines.items()):
        marker = MARKS[place % len(MARKS)] if len(x) <= 40 else None
        style = ("-", "--", "-.", ":")[place // len(COLOURS) % 4]  # once all colours have been used
        colour, label = COLOURS[place % len(COLOURS)], shortened(name, 24)
        axes.plot(x, y, color=colour, label=label, linestyle=style, linewidth=1.6, marker=marker, markersize=4)
    for place, (name, (x, y)) in enumerate((dashed or {}).items()):
        colour, label = COLOURS[place % len(COLOURS)], shortened(name, 24)
        if len(x):  # an empty one keeps its place, for the colours of the others
            axes.plot(x, y, color=colour, label=label, linestyle=(0, (4, 2)), linewidth=1.3)
    if level is not None:
        axes.axhline(level[1], color=GREY, linestyle=":", linewidth=1.4, label=level[0])
    for step in boundaries:
        axes.axvline(step, color=GREY, linewidth=0.8)
    axes.set(xlabel=xlabel, ylabel=ylabel)
    _legend(axes, len(lines) + len(dashed or {}) + (level is not None))


@drawn
def confusion(axes: Axes, matrix: np.ndarray, names: Sequence[str]) -> None:
    """Draws the number of rows by label and prediction. The colour is the share of the label's rows."""
    support = matrix.sum(axis=1, keepdims=True)
    shares = np.divide(matrix, support, out=np.zeros(matrix.shape), where=support > 0)
    image = axes.imshow(shares, cmap="viridis", vmin=0, vmax=1, aspect="auto")
    axes.grid(False)
    places = range(len(names))
    if len(names) <= MOST_NAMED:
        shown = [shortened(name) for name in names]
        axes.set_xticks(places, shown, rotation=25, ha="right", rotation_mode="anchor")
        axes.set_yticks(places, shown)
        for i in places:
            for j in places:
                colour = "black" if shares[i, j] > 0.6 else "white"
                axes.text(j, i, f"{matrix[i, j]:,}", ha="center", va="center", color=colour, fontsize=9)
    axes.set(xlabel="predicted", ylabel="label")
    axes.figure.colorbar(image, ax=axes, label="share of the label's rows")


@drawn
def scatter(axes: Axes, labels: np.ndarray, values: np.ndarray, bounds: tuple[float, float]) -> None:
    """Draws predicted scores over labels. Where many rows would overlap, it draws their density."""
    low, high = min(bounds[0], values.min()), max(bounds[1], values.max())
    axes.plot(bounds, bounds, color=COLOURS[1], linewidth=1.2, label="as labelled", zorder=3)
    if len(labels) > 3000:
        extent = (*bounds, low, high)
        cells = axes.hexbin(labels, values, gridsize=36, cmap="viridis", bins="log", mincnt=1, extent=extent)
        axes.figure.colorbar(cells, ax=axes, label="rows")
    else:
        axes.plot(labels, values, "o", markersize=3, alpha=0.35, color=COLOURS[0], markeredgewidth=0, label="a row")
    axes.set(xlabel="label", ylabel="predicted score")
    _legend(axes, 2)


@drawn
def class_counts(axes: Axes, names: Sequence[str], labels: Sequence[int], values: Sequence[int]) -> None:
    """Draws the number of rows with each class as label and as prediction."""
    places = np.arange(len(names))
    axes.bar(places - 0.2, labels, 0.4, color=COLOURS[0], label="labels")
    axes.bar(places + 0.2, values, 0.4, color=COLOURS[4], label="predictions", hatch="//", edgecolor="white")
    if len(names) <= MOST_NAMED:
        axes.set_xticks(places, [shortened(name) for name in names], rotation=25, ha="right", rotation_mode="anchor")
    axes.grid(axis="x", visible=False)
    axes.set(xlabel="class" if len(names) > MOST_NAMED else "", ylabel="dev rows")
    _legend(axes, 2)


@drawn
def score_counts(axes: Axes, labels: np.ndarray, values: np.ndarray, bounds: tuple[float, float]) -> None:
    """Draws histograms of labels and predictions on the scale. Predictions outside the scale count at its ends."""
    edges = equal_edges(*bounds, bins=25).tolist()
    axes.hist(labels, edges, color=COLOURS[0], alpha=0.55, label="labels")
    axes.hist(np.clip(values, *bounds), edges, color=COLOURS[1], histtype="step", linewidth=1.8, label="predictions")
    axes.set(xlabel="score", ylabel="dev rows")
    _legend(axes, 2)


@drawn
def bins(
    axes: Axes,
    found: Sequence[Bin],
    xlabel: str,
    ylabel: str,
    *,
    level: tuple[str, float] | None = None,
    diagonal: tuple[float, float] | None = None,
) -> None:
    """Draws the mean in bins, with its 95 % interval.

    Args:
        level: the name and height of a horizontal line.
        diagonal: the start and end of the line on which mean and x are equal.
    """
    x, y = np.array([b.x for b in found]), np.array([b.y for b in found])
    bounds = np.array([b.interval or (b.y, b.y) for b in found])
    errors = np.abs(bounds.T - y)  # a mean may be a rounding outside
    if diagonal is not None:
        axes.plot(diagonal, diagonal, color=GREY, linestyle=":", label="if it were exact")
    if level is not None:
        axes.axhline(level[1], color=GREY, linestyle=":", linewidth=1.4, label=level[0])
    axes.errorbar(x, y, errors, color=COLOURS[0], marker="o", markersize=5, capsize=3, label="mean, 95 % interval")
    axes.set(xlabel=xlabel, ylabel=ylabel)
    _legend(axes, 1 + (level is not None) + (diagonal is not None))


@drawn
def study_scores(axes: Axes, metrics: Mapping[str, Cells]) -> None:
    """Draws the scores of a study's rows, a panel for each metric: points, means, and intervals of the differences.

    A dotted line marks the mean of the reference. If rows have different references, each row has its own line, and
    the row's label names its reference.
    """
    from matplotlib.figure import Figure

    figure = axes.figure
    assert isinstance(figure, Figure)
    axes.remove()
    rows = next(iter(metrics.values()))
    only = only_against(rows)
    labels = [shortened(name, 24) for name in rows]
    if not only:
        labels = [
            f"{label}\nagainst {shortened(cell.against, 24)}" if cell.against else label
            for label, cell in zip(labels, rows.values(), strict=True)
        ]
    figure.set_size_inches(WIDTH, (0.8 + (0.3 if only else 0.45) * len(rows)) * len(metrics))
    panels = figure.subplots(len(metrics), 1, squeeze=False)[:, 0]
    for panel, (metric, cells) in zip(panels, metrics.items(), strict=True):
        dotted = {"color": GREY, "linestyle": ":", "linewidth": 1.4}
        if only and (base := cells[only].mean) is not None:
            panel.axvline(base, **dotted)
        for place, cell in enumerate(cells.values()):
            base = cells[cell.against].mean if cell.against else None
            if not only and base is not None:
                panel.plot([base, base], [place - 0.4, place + 0.4], **dotted)
            panel.plot(cell.values, [place] * len(cell.values), "o", color=COLOURS[5], markersize=4, zorder=2)
            if cell.effect is not None and cell.verdict and base is not None:
                bounds = [base + cell.effect.low, base + cell.effect.high]
                panel.plot(bounds, [place, place], color=COLOURS[0], linewidth=1.6, zorder=1)
            if cell.mean is not None:
                panel.plot([cell.mean], [place], "|", color=COLOURS[0], markersize=12, markeredgewidth=2.5, zorder=3)
        panel.set(title=metric, ylim=(len(rows) - 0.5, -0.5))
        panel.set_yticks(range(len(rows)), labels)


def shortened(name: str, most: int = 18) -> str:
    return name if len(name) <= most else name[: most - 1] + "…"

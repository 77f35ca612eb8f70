"""A run against a server as a picture: tokens over time, every request as a line, and how latencies are spread."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sidestream.bench.spread import short
from sidestream.bench.summary import Latency, Summary
from sidestream.errors import ConfigError, SidestreamError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK, FAINT, WAITING, WORKING, FAILED = "#1f2933", "#e1e6eb", "#e9a23b", "#2b6cb0", "#c81e1e"
STYLE: Any = {
    "font.size": 9,
    "text.color": INK,
    "axes.edgecolor": "#9aa5b1",
    "axes.labelcolor": INK,
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": FAINT,
    "xtick.color": INK,
    "ytick.color": INK,
}
FORMATS = (".png", ".svg", ".pdf")
BINS, BARS = 60, 40  # of time and of latencies, about
LEAST = 1e-5  # seconds: chunks of one packet have no time between them, and a logarithm needs some
WIDE = 20  # most over least from which latencies are drawn on a logarithmic scale


def check_drawing(path: str) -> None:
    """Raises ConfigError for a file that cannot be, SidestreamError without matplotlib: better before a long run than after it."""
    file = Path(path)
    if file.suffix.lower() not in FORMATS:
        raise ConfigError(f"--output: got {path}, must end in one of {', '.join(FORMATS)}")
    if not file.parent.is_dir():
        raise ConfigError(f"--output: got {path}, must be in a directory that exists")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise SidestreamError("--output needs matplotlib", hint="pip install 'sidestream[bench]', or leave --output out.") from None


def draw(summary: Summary, path: str) -> None:
    """Write the picture, to a file of which `check_drawing` had nothing to say. Raises SidestreamError where it cannot be written."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(10, 8.6), layout="constrained")
        figure.suptitle(summary.head()[0], fontsize=9.5, x=0.012, ha="left")
        grid = figure.add_gridspec(3, 2, height_ratios=(1, 1.5, 1))
        over_time = figure.add_subplot(grid[0, :])
        _tokens_over_time(over_time, summary)
        _requests(figure.add_subplot(grid[1, :], sharex=over_time), summary)
        first, gaps = (
            [answer.ttft for answer in summary.ok if answer.ttft is not None],
            [gap for answer in summary.ok for gap in answer.gaps],
        )
        _latencies(figure.add_subplot(grid[2, 0]), "Time to the first token", "requests", first, summary.latencies["ttft"])
        _latencies(figure.add_subplot(grid[2, 1]), "Time between chunks", "chunks", gaps, summary.latencies["itl"])
        try:
            figure.savefig(path, dpi=150)
        except OSError as error:
            raise SidestreamError(f"--output: got {path}, which cannot be written: {error}") from None


def bin_width(seconds: float) -> float:
    """1, 2 or 5 times a power of ten: the least that makes no more bins than BINS."""
    power = 10.0 ** math.floor(math.log10(seconds / BINS))
    return next(step * power for step in (1, 2, 5, 10) if step * power * BINS >= seconds * (1 - 1e-9))


def rates(arrivals: Sequence[tuple[float, float]], seconds: float) -> tuple[Any, Any]:
    """Tokens per second in each bin, and the bins' edges; the last bin ends with the run."""
    width = bin_width(seconds)
    edges = np.append(np.arange(math.ceil(seconds / width - 1e-6)) * width, seconds)
    counts, _ = np.histogram([at for at, _ in arrivals], edges, weights=[tokens for _, tokens in arrivals])
    return counts / np.diff(edges), edges


def _tokens_over_time(axes: Axes, summary: Summary) -> None:
    seconds, mean = summary.run.seconds, summary.per_second(summary.output_tokens) or 0.0
    per_second, edges = rates([arrival for answer in summary.run.answers for arrival in answer.arrivals], seconds)
    axes.set_title(f"Output tokens per second, in steps of {bin_width(seconds):g} s")
    axes.stairs(per_second, edges, fill=True, color=WORKING, alpha=0.2)
    axes.stairs(per_second, edges, color=WORKING, linewidth=1.2, baseline=None)
    axes.axhline(mean, color=INK, linewidth=1, linestyle=(0, (4, 3)))
    axes.text(1.005, mean, f"{short(mean)}\nmean", transform=axes.get_yaxis_transform(), va="center")
    axes.grid(axis="y")
    axes.set_ylim(0, max(per_second.max(initial=0.0), mean) * 1.08 or 1.0)
    axes.set_xlim(0, seconds)


def _requests(axes: Axes, summary: Summary) -> None:
    """From above in the order in which they were sent; drawn without vectors, as there may be thousands."""
    from matplotlib.lines import Line2D
    from matplotlib.ticker import MaxNLocator

    answers = summary.run.answers
    width = max(0.4, min(5.0, 170 / len(answers)))
    spans: dict[str, list[tuple[int, float, float]]] = {WAITING: [], WORKING: [], FAILED: []}  # by color: row, start, end
    for row, answer in enumerate(answers, 1):
        first = answer.arrivals[0].at if answer.arrivals else answer.ended
        if answer.failure:
            spans[FAILED].append((row, answer.sent, answer.ended))
        else:
            spans[WAITING].append((row, answer.sent, first))
            spans[WORKING].append((row, first, answer.ended))
    for color, drawn in spans.items():
        if drawn:
            rows, starts, ends = zip(*drawn, strict=True)
            lines = axes.hlines(rows, starts, ends, colors=color, linewidth=width, rasterized=True)
            lines.set_capstyle("butt")
    if spans[FAILED]:
        axes.plot(
            [end for _, _, end in spans[FAILED]], [row for row, _, _ in spans[FAILED]], "x", color=FAILED, markersize=5, clip_on=False
        )
    legend = [(WAITING, "to the first token"), (WORKING, "to the end"), *([(FAILED, "failed")] if summary.failures else [])]
    handles = [Line2D([], [], color=color, linewidth=4) for color, _ in legend]
    axes.legend(
        handles, [words for _, words in legend], loc="lower right", bbox_to_anchor=(1, 1), ncols=3, frameon=False, borderaxespad=0.2
    )
    axes.set_title("Requests, in the order in which they were sent")
    axes.set_xlabel("seconds since the first request")
    axes.set_ylim(len(answers) + 0.5, 0.5)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=6, min_n_ticks=1))
    axes.grid(axis="x")


def _latencies(axes: Axes, title: str, what: str, seconds: Sequence[float], of: Latency | None) -> None:
    """A histogram of milliseconds, with the percentiles as lines."""
    from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, StrMethodFormatter

    axes.set_title(title)
    axes.set_xlabel("milliseconds")
    axes.set_ylabel(what)
    if of is None:
        axes.text(0.5, 0.5, "none", transform=axes.transAxes, ha="center")
        return
    values = np.maximum(seconds, LEAST) * 1e3
    low, high = values.min(), values.max()
    if high > WIDE * low:
        axes.set_xscale("log")
        axes.hist(values, list(np.geomspace(low, high, BARS)), color=WORKING, alpha=0.75)
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 1e3 * low else (1,)))
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.xaxis.set_minor_formatter(NullFormatter())
    else:
        alike = high < 1.05 * low  # few and the same: not a picture of rounding
        axes.hist(values, BARS, range=(low * 0.9, high * 1.1) if alike else (low, high), color=WORKING, alpha=0.75)
        axes.xaxis.set_major_locator(MaxNLocator(8, steps=[1, 2, 5, 10]))
    axes.grid(axis="y")
    axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
    top = axes.get_ylim()[1] * 1.25  # room for the words
    axes.set_ylim(0, top)
    for height, name, value in ((0.98, "p50", of.p50), (0.90, "p90", of.p90), (0.82, "p99", of.p99)):
        at = max(value, LEAST) * 1e3
        axes.axvline(at, color=INK, linewidth=1, linestyle=(0, (2, 2)), ymax=height)
        share = axes.transAxes.inverted().transform(axes.transData.transform((at, 0)))[0]
        side, offset = ("right", -3) if share > 0.85 else ("left", 3)  # of the line: the words stay inside
        words = f"{name}  {short(value * 1e3)}"
        shown = axes.annotate(words, (at, top * height), (offset, -2), textcoords="offset points", va="top", ha=side, fontsize=8)
        shown.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 0.5, "alpha": 0.8})  # over the lines of others

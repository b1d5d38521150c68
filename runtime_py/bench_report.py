"""A bench's result, as bench.py and __main__.py put it together, as text and as one HTML file with plots.

The HTML needs no network and no other file: plots are inline SVG, and its content policy forbids anything else.
"""

import importlib.util
import io
import re
from pathlib import Path

import jinja2
from markupsafe import Markup

from . import probe
from .bench import LEAST_DRAFTED

MIB = 1 << 20
SHOWN_POSITIONS = 4  # in the tables
GREY, BLUE, ORANGE, GREEN = "#9aa5b1", "#1f77b4", "#e07b39", "#3a9d5d"


def text(result: dict) -> str:
    """Tables for a terminal."""
    kinds = list(result["prompts_by_kind"])
    parts = [
        *heading(result),
        "",
        *_aligned([HEADER, *(_row(mode) for mode in result["modes"])]),
        "",
        *_aligned(
            [
                ["decode tokens/s", *kinds],
                *(
                    [
                        str(mode["draft_tokens"]),
                        *(_rate(mode["kinds"][kind]["decode_tokens_per_second"]) for kind in kinds),
                    ]
                    for mode in result["modes"]
                ),
            ]
        ),
        "",
        *probe.lines(result["probe"]),
        "",
        *(f"- {note}" for note in result["notes"]),
    ]
    return "\n".join(parts)


HEADER = [
    *("draft tokens", "decode tokens/s", "x plain", "prefill tokens/s", "first token ms", "tokens/round"),
    *("accepted by position", "target/drafter/host"),
]


def heading(result: dict) -> list[str]:
    memory = result["memory"]
    return [
        f"{result['bundle']} {result['recipe']} on {result['backend']}, threads: {result['threads']}, "
        f"KV in {result['kv_dtype']}, {result['machine']['cpu']} ({result['machine']['system']})",
        f"{result['prompt_count']} prompts of {result['prompt_tokens'][0]} to {result['prompt_tokens'][1]} tokens, up to "
        f"{result['tokens']} new tokens, greedy, {result['repeats']} repeats in turns: median (lowest to highest)",
        f"bundle {memory['bundle_bytes'] / MIB:.1f} MiB, peak memory {memory['peak_rss_mib']:.0f} MiB",
    ]


def _row(mode: dict) -> list[str]:
    share = mode["time_share"]
    return [
        str(mode["draft_tokens"]),
        told(mode["decode_tokens_per_second"], 1),
        told(mode["speedup"], 2),
        told(mode["prefill_tokens_per_second"], 0),
        told(mode["time_to_first_token_s"], 1, 1e3),
        "-" if mode["tokens_per_round"] is None else f"{mode['tokens_per_round']:.2f}",
        " ".join(f"{share:.2f}" for share in shown_shares(mode)[:SHOWN_POSITIONS]) or "-",
        "/".join(f"{share[who]:.0%}" for who in ("target", "drafter", "host")),
    ]


def shown_shares(mode: dict) -> list[float]:
    """Of the positions that were drafted often enough to say something."""
    places = mode["acceptance_per_position"]
    return [place["share"] for place in places if place["drafted"] >= LEAST_DRAFTED]


def told(entry: dict | None, digits: int, factor: float = 1) -> str:
    """A spread; - where nothing was measured."""
    if entry is None:
        return "-"
    middle, low, high = (f"{entry[name] * factor:.{digits}f}" for name in ("median", "lowest", "highest"))
    return f"{middle} ({low} to {high})"


def _rate(entry: dict | None) -> str:
    return "-" if entry is None else f"{entry['median']:.1f}"


def _aligned(rows: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def require_matplotlib() -> None:
    """ValueError, before anything is measured, where it is missing. It is not imported yet: the peak of memory would be
    its own."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("matplotlib is not installed; --html needs pip install -e '.[bench]'")


def html(result: dict) -> str:
    """The whole page."""
    template = Path(__file__).with_name("bench_report.html.jinja").read_text(encoding="utf-8")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    plots = [("speed", _plot_speed), ("acceptance", _plot_acceptance), ("time", _plot_time), ("memory", _plot_memory)]
    return environment.from_string(template).render(
        result=result,
        verdict=probe.verdict_line(result["probe"]),
        heading=heading(result),
        header=HEADER,
        rows=[_row(mode) for mode in result["modes"]],
        rate=_rate,
        told=told,
        figures={name: Markup(_svg(name, draw, result)) for name, draw in plots},
    )


def _svg(name: str, draw, result: dict) -> str:
    """An <svg> element whose ids begin with `name`, so that several share a page."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    settings = {"svg.fonttype": "none", "svg.hashsalt": name, "font.family": "sans-serif", "font.size": 10}
    with rc_context({**settings, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(5.2, 3.2), layout="constrained")
        draw(figure.subplots(), result)
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    svg = file.getvalue()
    svg = svg[svg.index("<svg") :]  # without the XML declaration and a document type on another server
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    return re.sub(r'(href="|url\()#', rf"\1#{name}-", svg)


def _labels(result: dict) -> list[str]:
    return [str(mode["draft_tokens"]) for mode in result["modes"]]


def _plot_speed(axes, result: dict) -> None:
    modes = [mode for mode in result["modes"] if mode["decode_tokens_per_second"]]
    rates = [mode["decode_tokens_per_second"] for mode in modes]
    middle = [rate["median"] for rate in rates]
    errors = [
        [rate["median"] - rate["lowest"] for rate in rates],
        [rate["highest"] - rate["median"] for rate in rates],
    ]
    colors = [
        GREY if mode["draft_tokens"] == 0 else GREEN if mode["draft_tokens"] == "auto" else BLUE for mode in modes
    ]
    axes.bar([str(mode["draft_tokens"]) for mode in modes], middle, yerr=errors, capsize=4, color=colors)
    for i, value in enumerate(middle):
        axes.annotate(f"{value:.1f}", (i, 0), (0, 4), textcoords="offset points", ha="center", color="white")
    axes.set(xlabel="draft tokens", ylabel="decode tokens/s", title="Speed by draft tokens")


def _plot_acceptance(axes, result: dict) -> None:
    drafted = [mode for mode in result["modes"] if shown_shares(mode)]
    for mode in drafted:
        shares = shown_shares(mode)
        axes.plot(range(1, len(shares) + 1), shares, marker="o", label=str(mode["draft_tokens"]))
    if drafted:
        axes.legend(title="draft tokens", fontsize=8)
    else:
        axes.text(0.5, 0.5, "nothing was drafted", ha="center", transform=axes.transAxes)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set(xlabel="position in the block", ylabel="share accepted", ylim=(0, 1.02), title="Acceptance per position")


def _plot_time(axes, result: dict) -> None:
    left = [0.0] * len(result["modes"])
    for who, color in (("target", BLUE), ("drafter", ORANGE), ("host", GREY)):
        shares = [100 * mode["time_share"][who] for mode in result["modes"]]
        axes.barh(_labels(result), shares, left=left, color=color, label=who)
        left = [a + b for a, b in zip(left, shares, strict=True)]
    axes.invert_yaxis()
    axes.legend(ncols=3, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.22))
    axes.set(xlabel="% of the time", ylabel="draft tokens", xlim=(0, 100), title="Where the time goes")


def _plot_memory(axes, result: dict) -> None:
    memory = result["memory"]
    bars = {
        "target weights": memory["weights_bytes"] / MIB,
        "drafter": memory["drafter_bytes"] / MIB,
        "tables (mapped)": memory["tables_bytes"] / MIB,
        f"KV, {memory['context_tokens']} tokens": memory["kv_bytes"] / MIB,
        "peak of the process": memory["peak_rss_mib"],
    }
    places = axes.barh(list(bars), list(bars.values()), color=[BLUE, ORANGE, GREY, GREEN, "#444444"])
    axes.bar_label(places, fmt="%.1f", padding=3)
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.set(xlabel="MiB", title="Memory")

"""Draws `bench gdn`: time against length for single sequences, beside the floor.

    python benchmarks/plot_gdn.py benchmarks/results/gdn_h200.json docs/performance/gdn_lengths.svg

One panel for each pair of heads of q and v; a line for each side without checkpoints, by the median
of its repeats. The floor is the time to move inputs, outputs and states once. Needs matplotlib,
which the extra `docs` installs.
"""

from __future__ import annotations

import argparse
import collections
import json
import pathlib
from typing import Any

Points = dict[str, list[tuple[int, float]]]  # of a side: tokens, microseconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("result", type=pathlib.Path, help="JSON of bench gdn --out")
    parser.add_argument("picture", type=pathlib.Path, help="SVG to write")
    options = parser.parse_args()
    draw(json.loads(options.result.read_text()), options.picture)


def panels(result: dict[str, Any]) -> dict[tuple[int, int], Points]:
    """The lines of each pair of heads, by tokens, those of one sequence only."""
    found: dict[tuple[int, int], Points] = {}
    for row in result["cases"]:
        if len(row["lengths"]) != 1:
            continue
        tokens = row["lengths"][0]
        heads = row["q_heads"], row["v_heads"]
        lines = found.setdefault(heads, collections.defaultdict(list))
        lines["floor"].append((tokens, row["floor_us"]))
        for side in row["sides"]:
            if side["h"] is None and side["right"]:
                lines[side["side"]].append((tokens, side["median_us"]))
    return {heads: {name: sorted(line) for name, line in found[heads].items()} for heads in found}


def draw(result: dict[str, Any], picture: pathlib.Path) -> None:
    """Writes the picture; the same bytes for the same result."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "gdn"
    from matplotlib import pyplot

    lines = panels(result)
    if not lines:
        raise SystemExit("no case of one sequence in the result")
    figure, axes = pyplot.subplots(
        1, len(lines), figsize=(4.5 * len(lines), 4), sharey=True, squeeze=False
    )
    for axis, (heads, sides) in zip(axes[0], sorted(lines.items())):
        for name, line in sides.items():
            style = {"color": "gray", "linestyle": "--"} if name == "floor" else {"marker": "o"}
            axis.plot(*zip(*line), label=name, **style)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_title(f"Hq/Hv {heads[0]}/{heads[1]}")
        axis.set_xlabel("tokens")
        axis.grid(alpha=0.3)
        axis.legend()
    axes[0][0].set_ylabel("microseconds")
    figure.suptitle(f"gdn_chunk_prefill on {result['device']['name']}, {result['commit'][:12]}")
    figure.tight_layout()
    figure.savefig(picture, format="svg", metadata={"Date": None})
    pyplot.close(figure)


if __name__ == "__main__":
    main()

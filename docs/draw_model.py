"""Draws the figures of docs/model.md beside this file: `PYTHONPATH=. python docs/draw_model.py`."""

from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from wm_ds.model.schedule import Schedule

HERE = Path(__file__).parent
STATE, ROUTER, CHANNEL, LAYER, DUMMY = "#cfe0f5", "#f6d9b8", "#cdebd0", "#ffffff", "#e6e6e6"
matplotlib.rcParams.update({"svg.hashsalt": "wm_ds", "svg.fonttype": "none", "font.size": 9})


def box(ax: Axes, x: float, y: float, width: float, height: float, text: str, color: str) -> None:
    ax.add_patch(
        FancyBboxPatch((x, y), width, height, boxstyle="round,pad=0.02", facecolor=color, edgecolor="#444")
    )
    ax.text(x + width / 2, y + height / 2, text, ha="center", va="center")


def arrow(ax: Axes, start: tuple, end: tuple, color: str = "#444", bend: float = 0.0) -> None:
    style = f"arc3,rad={bend}"
    ax.add_patch(
        FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=10, color=color, connectionstyle=style)
    )


def draw_model() -> None:
    """A past token's states become its channels; a later token's layers read them. L = 4, k = 2, p = 2."""
    layers, channels = 4, 2
    figure, ax = plt.subplots(figsize=(10.5, 5.2))
    ax.set_axis_off()
    ax.set_xlim(-0.3, 11.6)
    ax.set_ylim(-1.35, 4.9)
    ax.text(0.9, 4.6, "token j, its pass done", ha="center", weight="bold")
    ax.text(5.0, 4.6, "pool of token j (K and V branch each)", ha="center", weight="bold")
    ax.text(10.1, 4.6, "a later token i", ha="center", weight="bold")
    for index in range(layers):
        y = index * 1.05
        box(ax, 0.0, y, 1.8, 0.7, f"$h_{index}$ enters layer {index}", STATE)
        arrow(ax, (1.85, y + 0.35), (5.15, 2.6 - 0.25 * (layers - index)), "#8aa6c8")
        if index % 2 == 1:
            arrow(ax, (1.85, y + 0.45), (2.9, 3.55), "#c98f4a")
    box(ax, 2.95, 3.3, 1.75, 0.75, "router\n$\\alpha = W\\xi + b$", ROUTER)
    box(ax, 5.2, 1.3, 1.3, 1.5, "mix\n$\\sum_l \\alpha_{cl}\\,\\hat h_l$", ROUTER)
    arrow(ax, (4.75, 3.6), (5.8, 2.85), "#c98f4a", -0.2)
    for channel in range(channels):
        y = 0.75 + 1.7 * channel
        box(ax, 7.0, y, 1.35, 0.8, f"channel {channel}\nnorm, $W_{channel}$", CHANNEL)
        arrow(ax, (6.55, 2.05), (6.95, y + 0.4))
    box(ax, 7.0, -1.1, 1.35, 0.7, "dummy,\nslot 0", DUMMY)
    for index in range(layers):
        y = index * 1.05
        box(ax, 9.3, y, 1.7, 0.7, f"layer {index}: q, o, mlp", LAYER)
        arrow(ax, (8.4, 1.15 + 1.7 * (index % channels)), (9.25, y + 0.35), "#5a9a62")
        arrow(ax, (8.4, -0.75), (9.25, y + 0.2), "#aaaaaa")
        if index:
            arrow(ax, (10.15, y - 0.31), (10.15, y - 0.03))
    ax.text(10.15, -0.45, "embedding $= h_0$", ha="center")
    arrow(ax, (10.15, -0.27), (10.15, -0.03))
    figure.savefig(HERE / "model.svg", bbox_inches="tight", metadata={"Date": None})


def draw_schedules() -> None:
    """When each position is updated; numbers are passes. From the schedules themselves."""
    length = 16
    shown = {
        "exact: one position after another": Schedule.exact(),
        "Jacobi, 3 passes": Schedule.jacobi(3),
        "cyclic, g = 4, 3 passes": Schedule.cyclic(4, 3),
        "wavefront, chunks of 8, g = 4, 2 passes": Schedule.wavefront(8, 4, 2),
    }
    figure, axes = plt.subplots(1, len(shown), figsize=(13, 3.6), sharey=False)
    for ax, (title, schedule) in zip(axes, shown.items()):
        steps = schedule.steps(length)
        for time, parts in enumerate(steps):
            for part in parts:
                for position in part.positions:
                    ax.add_patch(
                        plt.Rectangle(
                            (position, time), 1, 1, facecolor=plt.cm.viridis(0.3 + 0.25 * part.pass_index)
                        )
                    )
                    ax.text(position + 0.5, time + 0.5, part.pass_index + 1, ha="center", va="center", size=7)
        ax.set_xlim(0, length)
        ax.set_ylim(max(len(steps), 4), 0)
        ax.set_title(title, size=10)
        ax.set_xlabel("position")
        ax.set_ylabel("step")
        ax.set_xticks([])
        ax.set_yticks([])
    figure.tight_layout()
    figure.savefig(HERE / "schedules.svg", metadata={"Date": None})


if __name__ == "__main__":
    draw_model()
    draw_schedules()
    print(f"wrote {HERE / 'model.svg'} and {HERE / 'schedules.svg'}")

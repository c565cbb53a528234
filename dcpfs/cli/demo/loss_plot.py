"""The demo's picture: the loss of a run that was killed and resumed lies on that of the run that was not."""

from __future__ import annotations

from pathlib import Path

from dcpfs.cli.demo.job import Losses

__all__ = ["draw_losses"]


def draw_losses(losses: Losses, path: Path) -> None:
    """Draw the three curves into a PNG file.

    Args:
        losses: Of the demo's runs.
        path: Of the file; an older one is replaced.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    for curve, style, label in (
        (losses.undisturbed, {"color": "0.75", "linewidth": 6.0, "linestyle": "-"}, "undisturbed"),
        (losses.killed, {"color": "tab:blue", "marker": "o", "linestyle": "-"}, "saved every 2 steps, then killed"),
        (losses.resumed, {"color": "tab:orange", "marker": "s", "linestyle": "--"}, "resumed"),
    ):
        axes.plot(list(curve), list(curve.values()), label=label, **style)
    axes.set_xlabel("step")
    axes.set_ylabel("mean loss of 2 ranks")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)

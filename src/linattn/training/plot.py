"""The loss curve as a picture."""

from __future__ import annotations

from pathlib import Path

from linattn.training.events import read_metrics


def plot_loss(metrics: str | Path, png: str | Path) -> None:
    """Draw bits per byte over steps, training (each step and its running mean) and validation, from a metrics file.

    Args:
        metrics: The metrics file or its run folder.
        png: The picture to write.

    Raises:
        ValueError: no metrics there or no step in them; the picture cannot be written.
        ModuleNotFoundError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("plot_loss needs the package 'matplotlib' (pip install 'linattn[cli]')") from error
    lines = read_metrics(metrics)
    steps = [(line["step"], line["bits_per_byte"]) for line in lines if line["event"] == "step"]
    evaluations = [(line["step"], line["bits_per_byte"]) for line in lines if line["event"] == "evaluation"]
    if not steps:
        raise ValueError(f"{metrics}: holds no training step to draw")
    mean, means, share = 0.0, [], 2 / (1 + max(1, len(steps) / 50))
    for count, (_, bits) in enumerate(steps):
        mean += (bits - mean) * max(share, 1 / (count + 1))
        means.append(mean)
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(*zip(*steps, strict=True), color="tab:blue", alpha=0.25, linewidth=0.8, label="training, each step")
    axes.plot([step for step, _ in steps], means, color="tab:blue", label="training, running mean")
    if evaluations:
        axes.plot(*zip(*evaluations, strict=True), "o-", color="tab:orange", label="validation")
    axes.set(xlabel="step", ylabel="bits per byte")
    axes.set_ylim(bottom=0.9 * min(bits for _, bits in steps + evaluations), top=max(means) * 1.05)
    axes.grid(alpha=0.3)
    axes.legend()
    try:
        figure.savefig(png, dpi=150, format="png")
    except OSError as error:
        raise ValueError(f"{png}: cannot write: {error.strerror or error}") from error

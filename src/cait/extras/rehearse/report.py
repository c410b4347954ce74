"""What the figures of a rehearsal say: hours, what is slow, and the table of its answers."""

import math
from typing import Any

from rich.table import Table

from cait.errors import table_console
from cait.extras.display import duration

Figures = dict[str, Any]
"""As measure.py reports them, and verb.py adds to them."""
WAITING, SLOWER = 0.1, 0.9
"""The loader is slow if training waits longer than this share for it, and has less than this share of its speed."""
SLOW = {
    "validation": (0.25, "raise --trainer.check_val_every_n_epoch"),
    "checkpoints": (0.1, "save less often, or on a faster disk"),
}
"""What else a run does: the share of its time that is too much, and what helps."""
ADDING = 0.3
"""Share of a step from which on adding up gradients is slow: it may be hidden behind the backward pass."""
GB = 1e9


def times(figures: Figures) -> dict[str, float]:
    """Seconds of the run by what they go to."""
    steps = figures["steps"]
    epochs = steps / figures["steps_an_epoch"]
    validations = epochs * figures["validations_an_epoch"]
    saves = epochs + validations  # the last one, and the best one
    saves += steps / (figures["save_every_n_steps"] or math.inf)
    return dict(
        training=steps * figures["step_seconds"][0],
        validation=validations * figures["validation_seconds"],
        checkpoints=saves * figures["save_seconds"],
    )


def bound(figures: Figures) -> str:
    """What bounds the speed of the run, and what helps."""
    with_loader = figures["step_seconds"][0]
    speed = figures["step_seconds"][-1] / with_loader
    if figures["waiting_shares"][0] > WAITING and speed < SLOWER:
        return (
            f"the loader: {1 - speed:.0%} of a step; "
            f"raise --data.num_workers, now {figures['workers']}, or make reading cheaper"
        )
    seconds = times(figures)
    for name, (most, remedy) in SLOW.items():
        share = seconds[name] / sum(seconds.values())
        if share > most:
            return f"{name}: {share:.0%} of the time; {remedy}"
    adding = figures["add_seconds"] / with_loader
    if adding > ADDING:
        return f"adding up gradients, as long as {adding:.0%} of a step: accumulate batches"
    return f"nothing beside the network, on {figures['device']}"


def show(figures: Figures) -> None:
    table = Table(show_header=False)
    for row in rows(figures):
        table.add_row(*row)
    table_console(120, highlight=False).print(table)


def rows(figures: Figures) -> list[tuple[str, str]]:
    """The table: four questions and their answers, then figures."""
    seconds = times(figures)
    shares = ", ".join(f"{name} {duration(value)}" for name, value in seconds.items())
    speeds = [f"{figures['images_a_step'] / value:,.0f}" for value in figures["step_seconds"]]
    memory = [
        "{} {:.1f} GB for a process, {:.1f} GB left".format(name, *figures[name])
        if figures[name]
        else f"{name} not measured"
        for name in ("memory", "gpu")
    ]
    adding = "not measured: there is one process"
    if figures["add_seconds"]:
        share = 1 - 1 / figures["processes"]  # each process sends and receives it twice
        rate = 8 * share * figures["parameters"] / GB / figures["add_seconds"]
        adding = f"{figures['add_seconds']:.2g} s, {rate:.2f} GB/s by {figures['backend']}"
    saved = f"{figures['save_seconds']:.2g} s, {figures['save_bytes'] / 1e6:,.1f} MB"
    waiting = f"{figures['waiting_shares'][0]:.0%} of the time waits for them"
    return [
        ("will it fit?", f"yes: {'; '.join(memory)}"),
        ("how long will it take?", f"{duration(sum(seconds.values()))}: {shares}"),
        ("what is slow?", bound(figures)),
        ("can I stop it at any time?", figures["stop"]),
        ("and after kill -9?", figures["kill"]),
        ("images a second", f"{', without the loader '.join(speeds)}; {waiting}"),
        ("a validation", f"{figures['validation_seconds']:.2g} s"),
        ("a checkpoint", saved),
        ("adding up gradients", adding),
    ]

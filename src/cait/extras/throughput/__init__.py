"""Images per second, the share of the device's peak and memory in throughput.csv; a hint when steps wait for images."""

from typing import Any

from cait.plugins import Run, Setting

SETTINGS = [
    Setting(
        "throughput_every_n_steps",
        int | None,
        None,
        "Steps between rows of throughput.csv; null takes trainer.log_every_n_steps.",
    )
]


def callbacks(run: Run) -> list[Any]:
    """The log, and a hint about the wait for images unless the screen shows no progress."""
    from cait.extras.clock import Clock
    from cait.extras.gmacs import ForwardCost
    from cait.extras.throughput.log import ThroughputLog
    from cait.extras.throughput.wait import WaitHint

    clock, cost = run.share(Clock), run.share(ForwardCost)
    hints = [] if run.trainer.enable_progress_bar is False else [WaitHint(run.data, clock)]
    return [clock, *hints, ThroughputLog(run.data, clock, cost, run.config.throughput_every_n_steps)]

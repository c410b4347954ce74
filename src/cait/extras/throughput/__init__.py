"""Images per second, the share of the device's peak and memory, in throughput.csv and the loggers."""

from typing import Any

from cait.plugins import Run, Setting

SETTINGS = [
    Setting(
        "throughput_every_n_steps",
        int | None,
        None,
        "Steps between rows of throughput.csv; null takes trainer.log_every_n_steps, 0 writes none.",
    )
]
MOVED = {"cait.callbacks.throughput": "cait.extras.throughput.log"}


def callbacks(run: Run) -> list[Any]:
    from cait.extras.throughput.log import ThroughputLog

    return [ThroughputLog(run.data, run.config.throughput_every_n_steps)]

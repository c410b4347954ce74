"""Write checkpoints in a thread while training goes on."""

from typing import Any

from cait.plugins import Run, Setting

SETTINGS = [
    Setting(
        "save_async",
        bool,
        False,
        "Write checkpoints in a thread while training goes on; takes twice a checkpoint's size of host memory.",
    )
]


def checkpoint_io(run: Run) -> Any:
    """The writer that --save_async asks for."""
    if not run.config.save_async:
        return None
    from cait.extras.background.checkpoint_io import BackgroundCheckpointIO

    return BackgroundCheckpointIO()

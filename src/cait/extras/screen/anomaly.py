"""The line of one's own code at which --trainer.detect_anomaly finds a NaN."""

import os
import re
import warnings
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from cait.errors import is_own

FRAME = re.compile(r'File "(.+?)", line (\d+)')


class AnomalyLine(Callback):
    """Give an error the line of the forward pass, which torch names only in a warning."""

    def __init__(self) -> None:
        self._line = ""
        self._show = warnings.showwarning

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        warnings.showwarning = self._note

    def _note(self, message: Any, *others: Any, **options: Any) -> None:
        if "Traceback of forward call" in str(message):
            own = [frame for frame in FRAME.findall(str(message)) if is_own(frame[0])]
            self._line = ":".join(own[-1]).removeprefix(f"{os.getcwd()}/") if own else ""
        self._show(message, *others, **options)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        warnings.showwarning = self._show
        if self._line:
            exception.line_of_user = self._line  # type: ignore[attr-defined]  # for `cait.errors.own_line`

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        warnings.showwarning = self._show

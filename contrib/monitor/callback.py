"""Look inside the layers of a run: branches, gradients and updates, in monitor.csv and TensorBoard."""

import csv
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from cait import disk
from cait.errors import UserError
from cait.train.module import CaiTModule, whole_tensor
from contrib.monitor import FILE, branches

HEADER = "step,layer,part,name,value\n"
QUANTILES = {
    "gamma_min": 0.0,
    "gamma_q25": 0.25,
    "gamma_median": 0.5,
    "gamma_q75": 0.75,
    "gamma_max": 1.0,
}


class Monitor(Callback):
    """Measure the branches and the gradients of every layer in some steps. The run's results stay the same to the bit.

    README.md says what each figure is. The gradient is that of the whole step: averaged over the processes, without the
    scale of mixed precision, before clipping. What the branches do comes from a forward pass of their own before the
    step, see `contrib.monitor.branches.measure`. A figure that is not finite is left out, such as the cosine in a
    step whose gradient is 0. The n-th steps are those that metrics.csv has with the same trainer.log_every_n_steps.
    """

    def __init__(self, every_n_steps: int) -> None:
        if every_n_steps < 1:
            raise UserError(f"every_n_steps must be at least 1, got {every_n_steps}")
        self.every_n_steps = every_n_steps
        self._path: Path | None = None
        self._forget()

    def _forget(self) -> None:
        """Forget what was gathered for the last measured step."""
        self._activations: list[Tensor] = []  # one a micro-batch: [2 · branches]
        self._input_squares: dict[tuple[int, int], Tensor] = {}  # of (block, micro-batch)
        self._hooks: list[RemovableHandle] = []
        # gradient and weights, a vector each
        self._before: list[tuple[branches.Part, Tensor, Tensor]] = []
        self._figures: dict[tuple[int, str, str], Tensor] = {}  # by layer, part and name

    def _measures(self, step: int) -> bool:
        return (step + 1) % self.every_n_steps == 0

    def on_train_start(self, trainer: Trainer, pl_module: CaiTModule) -> None:  # type: ignore[override]
        self._parts = branches.parts(pl_module.model)
        # Metal has no float64.
        self._dtype = torch.float32 if pl_module.device.type == "mps" else torch.float64
        if trainer.is_global_zero and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            self._path = Path(trainer.default_root_dir) / FILE
            _keep_rows_before(self._path, trainer.global_step)

    def on_train_batch_start(  # type: ignore[override]
        self, trainer: Trainer, pl_module: CaiTModule, batch: tuple[Tensor, Tensor], batch_idx: int
    ) -> None:
        self._step = trainer.global_step
        if not self._measures(self._step):
            return
        with trainer.precision_plugin.forward_context():
            measured = branches.measure(pl_module.model, batch[0].to(pl_module.dtype))
        if measured:
            ratios, sizes = map(torch.stack, zip(*measured, strict=True))  # [branches, B]
            self._activations.append(
                torch.cat([ratios.mean(dim=1), sizes.square().mean(dim=1)]).to(self._dtype)
            )
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        scale = scaler.get_scale() if scaler else 1.0

        def look(block: int, gradient: Tensor) -> None:
            self._input_squares[block, batch_idx] = (self._norm(gradient) / scale).square()

        self._hooks = branches.watch_gradients(pl_module.model, look)

    def on_before_optimizer_step(
        self,
        trainer: Trainer,
        pl_module: CaiTModule,  # type: ignore[override]
        optimizer: Optimizer,
    ) -> None:
        if not self._measures(self._step):
            return
        scale = pl_module.gradient_scale(optimizer)
        self._before = []
        for part in self._parts:
            gradients = [
                torch.zeros_like(weight) if weight.grad is None else weight.grad
                for weight in part.parameters
            ]
            gradient = _flat(gradients) / scale
            self._before.append((part, gradient, _flat(part.parameters)))
            self._figures[part.layer, part.name, "grad_norm"] = self._norm(gradient)
            if part.gamma is not None:
                size = whole_tensor(part.gamma.detach()).abs().to(self._dtype)
                for name, quantile in QUANTILES.items():
                    self._figures[part.layer, part.name, name] = torch.quantile(size, quantile)

    def on_train_batch_end(self, trainer: Trainer, pl_module: CaiTModule, *_: Any) -> None:  # type: ignore[override]
        for hook in self._hooks:
            hook.remove()
        # else gradients accumulate
        if self._measures(self._step) and trainer.global_step > self._step:
            self._measure_activations(trainer)
            self._measure_updates()
            self._write(trainer)
            self._forget()

    def _measure_activations(self, trainer: Trainer) -> None:
        """Mean over micro-batches and processes; this reduction is the only one of a measured step."""
        if not self._activations:
            return
        activations = torch.stack(self._activations).mean(dim=0)
        squares = activations.new_zeros(len(self._parts) // 2)  # a block has two branches
        for (block, _), square in self._input_squares.items():
            squares[block] += square
        ratios, mean_squares, squares = trainer.strategy.reduce(
            torch.cat([activations, squares]), reduce_op="mean"
        ).split([len(self._parts), len(self._parts), len(squares)])
        for part, ratio, mean_square in zip(self._parts, ratios, mean_squares, strict=True):
            self._figures[part.layer, part.name, "branch_ratio"] = ratio
            self._figures[part.layer, part.name, "activation_rms"] = mean_square.sqrt()
        # The loss of the step is the mean of the losses of the processes.
        norms = (squares / trainer.world_size).sqrt()
        for block in {block for block, _ in self._input_squares}:
            first = self._parts[2 * block]
            name = "ca_block" if first.name == "ca" else "block"
            self._figures[first.layer, name, "input_grad_norm"] = norms[block]

    def _measure_updates(self) -> None:
        # empty if a callback in front of this one skipped the step
        for (
            part,
            gradient,
            before,
        ) in self._before:
            update = _flat(part.parameters).to(self._dtype) - before.to(self._dtype)
            self._figures[part.layer, part.name, "update_cosine"] = (
                -gradient.to(self._dtype) @ update / (self._norm(gradient) * self._norm(update))
            )
            self._figures[part.layer, part.name, "update_ratio"] = self._norm(update) / self._norm(
                before
            )

    def _norm(self, vector: Tensor) -> Tensor:
        return torch.linalg.vector_norm(vector, dtype=self._dtype)

    def _write(self, trainer: Trainer) -> None:
        if not self._path or not self._figures:
            return
        values = torch.stack([*self._figures.values()]).tolist()  # the one wait for the device
        rows = []
        scalars = {}
        for (layer, part, name), value in zip(self._figures, values, strict=True):
            if math.isfinite(value):
                rows.append((self._step, layer, part, name, f"{value:.8g}"))
                scalars[f"{name}/{part}.{layer:02}"] = value
        with self._path.open("a", newline="", encoding="utf-8") as file:
            csv.writer(file, lineterminator="\n").writerows(rows)
        for logger in trainer.loggers:
            if not isinstance(logger, CSVLogger):  # its table would have a column for each
                logger.log_metrics(scalars, self._step)


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    """A copy of all tensors in one vector. Sharded tensors are gathered, so all processes must call it together."""
    return torch.cat([whole_tensor(tensor.detach()).flatten() for tensor in tensors])


def _keep_rows_before(path: Path, first_step: int) -> None:
    """Leave only the header and the rows before `first_step` in the file, because later rows will come again."""
    content = HEADER
    if path.is_file():
        for line in disk.read_text(path).splitlines(keepends=True)[1:]:
            step = line.partition(",")[0]
            # a kill may have torn the last
            if line.endswith("\n") and step.isdecimal() and int(step) < first_step:
                content += line
    with disk.atomic_write(path) as beside:
        beside.write_text(content, encoding="utf-8")

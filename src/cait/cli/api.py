"""`cait.fit`: what `cait fit` does, from Python."""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from cait import cores
from cait.cli.fit import continued, train
from cait.cli.loading import load
from cait.cli.options import Line
from cait.run import rundir
from cait.run.program import Program
from cait.settings import as_text


def fit(
    root: str | Path | None = None,
    settings: Mapping[str, Any] | None = None,
    *,
    config: Iterable[str | Path] = (),
    run_name: str | None = None,
    resume: str | Path | None = None,
    module: Any = None,
    data: Any = None,
) -> Any:
    """Train on a folder of images as `cait fit` does, and return the best network.

        run = cait.fit("my_photos", {"trainer.max_epochs": 10})
        run.predict("x.jpg")

    The run has its folder in logs/, and `cait resume` goes on with it. Raises UserError for a setting that cannot be
    used.

    Args:
        root: `data.root`: a folder with a folder of images for each class.
        settings: by name, as `cait fit --help` lists them. They win over configurations, as what is typed does.
        config: configurations, each as --config takes it; without one a recipe is chosen for the folder.
        run_name: name of a new run.
        resume: a run to go on with, as a name in logs/ or a folder.
        module: a subclass of `cait.CaiTModule` to use in its place, or its path, as "my_package.module:Module".
        data: a subclass of `cait.ImageNetDataModule` to use in its place, or its path.

    Returns:
        the best network of the run, as `cait.load` returns it.
    """
    cores.before_torch()
    typed = dict(settings or {})
    if root is not None:
        typed["data.root"] = os.fspath(root)
    if run_name is not None:
        typed["run_name"] = run_name
    program = Program()
    if isinstance(module, str):
        typed["module"] = module
    else:
        program.module = module
    if isinstance(data, str):
        typed["data_module"] = data
    else:
        program.data = data
    words = [f"--config={os.fspath(path)}" for path in config]
    words += [f"--{name}={as_text(value)}" for name, value in typed.items()]
    if resume is None:
        line = Line("fit", words)
        line.extend(program)
    else:
        line = continued(rundir.folder_of(os.fspath(resume)), words, program)
    folder = train(line, program)
    return load(folder, module=program.module, data=program.data)

"""The command `cait`: LightningCLI's verbs and the project's own, put together here and nowhere else."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any, NoReturn

from cait.errors import UserError

LOGS = Path("logs")

HELP = """\
usage: cait VERB [options]

Train CaiT, "Going deeper with Image Transformers", with PyTorch Lightning.

  fit        train:              cait fit --config configs/digits.yaml --run_name NAME
  resume     go on with a run:   cait resume NAME [--trainer.max_epochs 100 ...]
  eval       score a run:        cait eval NAME [--ckpt_path FILE ...]
  validate   score a checkpoint on the validation set, logged as val/...
  test       the same, logged as test/...
  predict    write a CSV of classes and probabilities for a folder of pictures
  export     take a run out:     cait export NAME [--format timm|release|onnx|torch_export]
             [--ema] [--output PATH], by default below logs/NAME/export/
  zoo        the paper's models, their size and cost [--json]

`cait VERB --help` lists every setting of fit, validate, test and predict;
`cait fit --config FILE --print_config` shows what a run would use. Anything that
stands in a YAML file can be given on the command line: --model.lr 1e-3
"""


def main(argv: list[str] | None = None) -> None:
    """Run `cait` with `argv`, by default the process's arguments."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("-h", "--help"):
        print(HELP, end="")
        return
    try:
        _run(argv)
    except UserError as error:
        _stop(str(error))


def _stop(message: str) -> NoReturn:
    # An error that crosses a worker process arrives with the worker's traceback in front of it.
    line = message.strip().splitlines()[-1].removeprefix("cait.errors.UserError: ")
    print(f"cait: error: {line}", file=sys.stderr, flush=True)
    raise SystemExit(2)


def _run(argv: list[str]) -> None:
    verb, rest = argv[0], argv[1:]
    if verb == "resume":
        argv = _resume_arguments(rest)
    elif verb == "eval":
        argv = _eval_arguments(rest)
    elif verb == "export":
        return _export(rest)
    elif verb == "zoo":
        return _zoo(rest)
    elif verb not in ("fit", "validate", "test", "predict"):
        raise UserError(f"unknown verb {verb!r}; `cait --help` lists them")
    # The processes that Lightning starts for DDP repeat this command line.
    sys.argv[1:] = argv
    from lightning.pytorch.utilities.exceptions import MisconfigurationException

    from cait.lightning_cli import CaiTCLI

    try:
        CaiTCLI()
    except MisconfigurationException as error:
        raise UserError(" ".join(str(error).split())) from error


def _zoo(rest: list[str]) -> None:
    if rest not in ([], ["--json"]):
        raise UserError("`cait zoo` takes no option but --json")
    from cait.analysis.zoo import show

    show(as_json=bool(rest))


class _Options(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; `{self.prog} --help` lists what there is")


def _export(rest: list[str]) -> None:
    from cait.lightning_cli import read_checkpoint
    from cait.model.cait import create_model
    from cait.model.export import FILE_NAMES, export
    from cait.model.weights import load_weights

    options = _Options(prog="cait export", description="Take a run's best weights out.", allow_abbrev=False)
    options.add_argument("run", metavar="NAME", nargs="?", help="the run's folder in logs/")
    options.add_argument("--format", choices=FILE_NAMES, default="timm", help="timm unless given")
    options.add_argument("--ema", action="store_true", help="the moving average instead of the raw weights")
    options.add_argument("--output", type=Path, metavar="PATH", help="file, for timm directory, to write")
    given = options.parse_args(rest)
    run_dir, _ = _run_dir("export", [given.run] if given.run else [])
    checkpoint = _best_checkpoint(run_dir, "export")
    preprocessing = _preprocessing(run_dir) if given.format == "timm" else {}
    # The run's network, whatever its configuration says today.
    network = read_checkpoint(str(checkpoint)).get("hyper_parameters", {})
    try:
        names = ("name", "img_size", "num_classes", "drop_path_rate")
        model = create_model(**{name: network[name] for name in names}, **(network["fields"] or {}))
    except KeyError as error:
        raise UserError(f"{checkpoint} does not say what its network is: {error} is missing") from error
    load_weights(model, checkpoint, ema=given.ema)
    default = Path("ema" if given.ema else "") / FILE_NAMES[given.format]
    exported = export(model, given.output or run_dir / "export" / default, given.format, preprocessing)
    for file in exported.files:
        print(os.path.relpath(file))
    print(f"read back, the logits differ by {exported.difference:.1e} at most")


def _preprocessing(run_dir: Path) -> dict[str, Any]:
    """What timm's configuration tells of the pictures' way into the network."""
    import yaml

    _, config = _config(run_dir)
    try:
        data = yaml.safe_load(Path(config).read_text())["data"]
        return {name: data[name] for name in ("mean", "std", "crop_pct", "interpolation")}
    except (yaml.YAMLError, UnicodeDecodeError, KeyError, TypeError) as error:
        line = " ".join(str(error).split())
        raise UserError(f"{config} does not say how pictures are prepared: {line}") from error


def _resume_arguments(rest: list[str]) -> list[str]:
    run_dir, overrides = _run_dir("resume", rest)
    last = run_dir / "checkpoints" / "last.ckpt"
    if not last.is_file():
        raise UserError(f"nothing to resume: {run_dir} has no checkpoint yet; start it with `make train`")
    return ["fit", *_config(run_dir), *overrides, "--ckpt_path", str(last)]


def _eval_arguments(rest: list[str]) -> list[str]:
    run_dir, overrides = _run_dir("eval", rest)
    checkpoint = _best_checkpoint(run_dir, "score")
    return ["validate", *_config(run_dir), "--ckpt_path", str(checkpoint), *overrides]


def _best_checkpoint(run_dir: Path, purpose: str) -> Path:
    for name in ("best.ckpt", "last.ckpt"):  # a run that was never validated has no best
        checkpoint = run_dir / "checkpoints" / name
        if checkpoint.is_file():
            return checkpoint
    raise UserError(f"nothing to {purpose}: {run_dir} has no checkpoint yet")


def _run_dir(verb: str, rest: list[str]) -> tuple[Path, list[str]]:
    if not rest or rest[0].startswith("-"):
        raise UserError(f"which run? `cait {verb} NAME`; runs are the folders in {LOGS}/")
    run_dir = LOGS / rest[0]
    if not run_dir.is_dir():
        runs = sorted(path.parent.name for path in LOGS.glob("*/config.yaml"))
        raise UserError(f"there is no run {run_dir}; {'runs: ' + ', '.join(runs) if runs else 'there are none yet'}")
    return run_dir, rest[1:]


def _config(run_dir: Path) -> list[str]:
    config = run_dir / "config.yaml"
    if not config.is_file():
        raise UserError(f"{config} is missing, so what the run was cannot be told")
    return ["--config", str(config)]

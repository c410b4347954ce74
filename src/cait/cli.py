"""The command `cait`: LightningCLI's verbs and the project's own, put together here and nowhere else."""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import sys
from pathlib import Path
from typing import Any, NoReturn

from cait import launch
from cait.errors import UserError

LOGS = Path("logs")
TRUST = "--trust-config"

HELP = """\
usage: cait VERB [options]

Train CaiT, "Going deeper with Image Transformers", with PyTorch Lightning.

  fit        train:              cait fit --config configs/digits.yaml --run_name NAME
  resume     go on with a run:   cait resume NAME [--trainer.max_epochs 100 ...]
  eval       score a run:        cait eval NAME [--v2 DIR --real FILE --ckpt_path FILE ...]
  validate   score a checkpoint or weights on the validation set, as `eval` does
  test       loss and accuracy alone, logged as test/...
  predict    write a CSV of classes and probabilities for a folder of pictures
  export     take a run out:     cait export NAME [--format timm|release|onnx|torch_export]
             [--ema] [--output PATH], by default below logs/NAME/export/
  zoo        the paper's models, their size and cost [--json]
  paper      the rows of the paper's tables, each a run: cait paper [TABLE] [--json]
  imagenet-check   count a data folder, decode a sample: cait imagenet-check DIR [--pictures 2000]

`cait fit --paper table1/layerscale-36` trains a row of the paper, `cait validate --paper ...`
scores it; the settings of the row can be overridden like any.

`cait VERB --help` lists every setting of fit, validate, test and predict;
`cait fit --config FILE --print_config` shows what a run would use. Anything that
stands in a YAML file can be given on the command line: --model.lr 1e-3
"""

USAGE = {
    "resume": """\
usage: cait resume RUN [options of fit]

Go on with a run, a name in logs/ or the path of its folder, from its last checkpoint
or from --ckpt_path FILE. What is given now wins over the run's own settings.

  --trust-config   run classes that the run's config.yaml names from outside cait, lightning,
                   torch, torchmetrics and torchvision; a stranger's may do anything""",
    "eval": """\
usage: cait eval RUN [options of validate]

Score a run, a name in logs/ or the path of its folder, on the validation set: its best
checkpoint, or --ckpt_path FILE; raw weights and moving average. evaluation.json in the
run's folder, or --output FILE, has accuracy by class and the confusion matrix too.

  --v2 DIR      score it on ImageNet-V2 as well, or on more pictures of the same classes
  --real FILE   score it on ReaL's labels (real.json); ImageNet needs no file""",
    "zoo": """\
usage: cait zoo [--json]

List the paper's models with their size, cost and published accuracy.""",
    "paper": """\
usage: cait paper [TABLE] [--json]

List the rows of the paper's tables: what differs, size, cost, published and reproduced
accuracy, and the command that runs it.""",
}


def main(argv: list[str] | None = None) -> None:
    """Run `cait` with `argv`, by default the process's arguments."""
    # Before torch is loaded: CPU threads that wait for work by spinning make a run beside any other job on the
    # same cores five to twenty times slower. Alone, a network as small as the digits' is 1.6 times faster with
    # OMP_WAIT_POLICY=ACTIVE, which is left to whoever knows that nothing else runs.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    argv = sys.argv[1:] if argv is None else argv
    try:
        _run(argv)
        sys.stdout.flush()
    except UserError as error:
        training = argv[:1] in (["fit"], ["resume"])
        _stop(launch.tell(str(error)) if training else str(error))
    except (KeyboardInterrupt, BrokenPipeError, SystemExit) as error:
        # Lightning makes a SystemExit of the first, once it has said what to type next, and rich of the second.
        cause = error.__context__ if isinstance(error, SystemExit) else error
        if isinstance(cause, KeyboardInterrupt):
            if error is cause:
                print("cait: interrupted", file=sys.stderr)
            raise SystemExit(130) from None
        if isinstance(cause, BrokenPipeError):  # the reader has gone, as in `cait zoo | head -1`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at the interpreter's end
            raise SystemExit(141) from None
        raise


def _stop(message: str) -> NoReturn:
    # An error that crosses a worker process arrives with the worker's traceback in front of it.
    line = message.strip().splitlines()[-1].removeprefix("cait.errors.UserError: ")
    print(f"cait: error: {line}", file=sys.stderr, flush=True)
    raise SystemExit(2)


def _run(argv: list[str]) -> None:
    if not argv or argv[0] in ("-h", "--help"):
        print(HELP, end="")
        return
    verb, rest = argv[0], argv[1:]
    if verb in USAGE and not {"-h", "--help"}.isdisjoint(rest):
        print(USAGE[verb])
        return
    # The processes that Lightning starts for DDP repeat this command line.
    sys.argv[1:] = argv
    if verb in ("fit", "resume", "eval", "validate", "test", "predict"):
        _lightning(verb, rest)
    elif verb == "export":
        return _export(rest)
    elif verb == "zoo":
        return _zoo(rest)
    elif verb == "paper":
        return _paper(rest)
    elif verb == "imagenet-check":
        return _imagenet_check(rest)
    else:
        raise UserError(f"unknown verb {verb!r}; `cait --help` lists them")


def _lightning(verb: str, rest: list[str]) -> None:
    """Run one of Lightning's verbs, or ours that become one of them."""
    given = [argument for argument in rest if verb != "resume" or argument.replace("_", "-") != TRUST]
    if verb == "resume":
        arguments = _resume_arguments(given)
    elif verb == "eval":
        arguments = _eval_arguments(given)
    else:
        arguments = [verb, *(given if verb == "predict" else _paper_row(verb, given))]
    from lightning.pytorch.utilities.exceptions import MisconfigurationException

    from cait import trust
    from cait.lightning_cli import CaiTCLI

    limits: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if verb == "resume" and given == rest:
        limits = trust.only_importing(
            [*trust.PACKAGES, *trust.named(given)], arguments[2], f"if you trust it add {TRUST}"
        )
    elif verb not in ("fit", "resume"):  # to score takes no class at all; what is given to `fit` is the user's own
        arguments = trust.to_score(arguments)
        limits = trust.only_importing(trust.named(given), "the configuration", "give it on the command line")
    try:
        with limits:
            CaiTCLI(arguments)
    except MisconfigurationException as error:
        raise UserError(" ".join(str(error).split())) from error
    except OSError as error:
        # With a name it is about a file: no permission, a file for a folder. A full disk comes without one.
        if error.filename is None and error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise UserError(f"cannot use {error.filename or 'the disk'}: {error.strerror}") from error


def _zoo(rest: list[str]) -> None:
    if rest not in ([], ["--json"]):
        raise UserError("`cait zoo` takes no option but --json")
    from cait.analysis.zoo import show

    show(as_json=bool(rest))


def _paper(rest: list[str]) -> None:
    named = [argument for argument in rest if argument != "--json"]
    if len(named) > 1 or any(argument.startswith("-") for argument in named):
        raise UserError("`cait paper` takes a table and --json, nothing else")
    from cait.analysis.paper import show

    show(named[0] if named else None, as_json="--json" in rest)


def _imagenet_check(rest: list[str]) -> None:
    from cait.data.check import check

    options = _Options(
        prog="cait imagenet-check",
        description="Count the pictures of a data folder and decode some.",
        allow_abbrev=False,
    )
    options.add_argument("root", metavar="DIR", type=Path, help="with train/<class>/ and val/<class>/")
    options.add_argument(
        "--images",
        "--pictures",
        type=int,
        default=2000,
        metavar="N",
        help="how many to decode, 2000 unless given, over all classes",
    )
    given = options.parse_args(rest)
    if given.images < 0:
        raise UserError(f"--images must be at least 0, got {given.images}")
    check(given.root, given.images)


def _paper_row(verb: str, rest: list[str]) -> list[str]:
    """`rest` with `--paper ROW` replaced by the settings of the row; what is given beside it wins."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--paper")
    try:
        options, others = parser.parse_known_args(rest)
    except argparse.ArgumentError as error:
        raise UserError("--paper takes a row, as table1/layerscale-36; `cait paper` lists them") from error
    if options.paper is None:
        return rest
    from cait.analysis.paper import find

    row = find(options.paper)
    names = {argument.split("=")[0] for argument in others}
    arguments = [*row.arguments(), f"--paper_row={row.id}"]
    if verb == "fit":
        if row.evaluate:
            raise UserError(f"nothing is trained in {row.id}, it is scored: `{row.command}`")
        if "--run_name" not in names:
            arguments.append(f"--run_name={row.run_name}")
    start = row if verb != "fit" and not row.evaluate else row.weights_of and find(row.weights_of, row.table)
    if start and not names & {"--model.weights", "--model.pretrained", "--ckpt_path"}:
        weights = start.run_dir / "checkpoints" / "last.ckpt"
        if not weights.is_file() and "--print_config" not in names:
            raise UserError(
                f"{row.id} needs the weights of {start.id}, and there is no {weights}: "
                f"`{start.command}` first, or give --model.weights FILE"
            )
        # A run of the row itself is read whole, for its moving average.
        arguments.append(f"--{'ckpt_path' if start is row else 'model.weights'}={weights}")
        if verb == "validate":
            arguments.append(f"--output={row.run_dir / 'evaluation.json'}")
    return [*arguments, *others]


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
    try:
        return _resume(*_run_dir("resume", rest))
    except UserError as error:
        raise UserError(f"{error}; all nodes must share {LOGS}/" if launch.several() else str(error)) from error


def _resume(run_dir: Path, overrides: list[str]) -> list[str]:
    # The folder may have been moved or renamed since its configuration was written.
    place = ["--trainer.default_root_dir", str(run_dir.parent), "--run_name", run_dir.name]
    if not any(override.split("=")[0] == "--ckpt_path" for override in overrides):
        from cait.callbacks.checkpoints import newest_whole

        last = newest_whole(run_dir / "checkpoints")
        if last is None:
            raise UserError(f"nothing to resume: {run_dir} has no checkpoint yet; start it with `make train`")
        place += ["--ckpt_path", str(last)]
        sys.argv += place[-2:]  # the processes that Lightning starts go on from the same one
    return ["fit", *_config(run_dir), *place, *overrides]


def _eval_arguments(rest: list[str]) -> list[str]:
    run_dir, overrides = _run_dir("eval", rest)
    checkpoint = _best_checkpoint(run_dir, "score")
    output = run_dir / "evaluation.json"
    return ["validate", *_config(run_dir), "--ckpt_path", str(checkpoint), "--output", str(output), *overrides]


def _best_checkpoint(run_dir: Path, purpose: str) -> Path:
    for name in ("best.ckpt", "last.ckpt"):  # a run that was never validated has no best
        checkpoint = run_dir / "checkpoints" / name
        if checkpoint.is_file():
            return checkpoint
    raise UserError(f"nothing to {purpose}: {run_dir} has no checkpoint yet")


def _run_dir(verb: str, rest: list[str]) -> tuple[Path, list[str]]:
    if not rest or rest[0].startswith("-"):
        raise UserError(f"which run? `cait {verb} NAME`; runs are the folders in {LOGS}/")
    for run_dir in (LOGS / rest[0], Path(rest[0])):  # a name, or the path of a run that lies elsewhere
        if run_dir.is_dir():
            return run_dir, rest[1:]
    runs = sorted(path.parent.name for path in LOGS.glob("*/config.yaml"))
    raise UserError(f"there is no run {LOGS / rest[0]}; {'runs: ' + ', '.join(runs) if runs else 'there are none yet'}")


def _config(run_dir: Path) -> list[str]:
    config = run_dir / "config.yaml"
    if not config.is_file():
        raise UserError(f"{config} is missing, so what the run was cannot be told")
    return ["--config", str(config)]

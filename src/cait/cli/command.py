"""The command `cait`: a table of its verbs, and what every verb has in common."""

from __future__ import annotations

import os
import sys
import traceback
from contextlib import suppress
from importlib import import_module
from io import TextIOWrapper
from typing import TYPE_CHECKING, NoReturn

import cait
from cait.errors import UserError, did_you_mean, kind_and_place, of_file
from cait.extras.watch import launch
from cait.run import rundir

if TYPE_CHECKING:
    from cait.data.datamodule import ImageNetDataModule
    from cait.extras.watch.watch import Watch
    from cait.train.module import CaiTModule

HELP = """\
usage: cait VERB [options]

Train CaiT, "Going deeper with Image Transformers", with PyTorch Lightning.

  fit        train:              cait fit --config configs/digits.yaml --run_name NAME
             on a folder of images, with a recipe chosen for it:
             cait fit --data.root DIR [--from FILE|timm|RUN]
  resume     continue a run:     cait resume NAME [--trainer.max_epochs 100 ...]
  eval       score a run:        cait eval NAME [--wanted_accuracy 0.95 --tta hflip ...]
  validate   score a checkpoint or weights on the validation set, as `eval` does
  test       loss and accuracy alone, logged as test/...
  predict    classify images: cait predict NAME FILE|DIR ... [--format table|csv|jsonl]
             [--top_k K] [--output FILE] [--raw]
  export     write a run's network for other programs:
             cait export NAME [--format timm|release|onnx|torch_export] [--ema] [--output PATH]
  demo       write a page that runs a run's network in the browser:
             cait demo NAME [--quantize] [--output DIR] [--runtime FILE.tgz|DIR]
  card       write a run's model card, README.md for the Hugging Face Hub: cait card NAME
  push       put a run on the Hub for timm: cait push NAME OWNER/NAME [--dry-run] [--private]
  consolidate  write a sharded checkpoint as one file: cait consolidate NAME [--checkpoint best|last]
  visualize  draw attention maps of images, and a page of what a run gets wrong:
             cait visualize NAME [--images FILE|DIR ...] [--self_attention BLOCK,...] [--ema]
  plot       draw a run's curves and the heat maps of its layers: cait plot NAME [--output DIR]
  runs       list the runs in logs/, how far they are and their best accuracy: cait runs [--json]
  compare    what differs between runs, and their curves: cait compare NAME NAME ... [--output FILE]
  replay     show the images, loss and gradients of past steps, to the bit:
             cait replay NAME --step N [--count K] [--data-only] [--output DIR]
  zoo        list the paper's models, their size and cost [--json]
  paper      list the rows of the paper's tables, each a run: cait paper [TABLE] [--json]
  study      train LayerScale and its rivals at several depths: cait study [--size full]
  sweep      search settings for the best run, in trials: cait sweep SPACE.yaml [--jobs N] [--show]
  find-lr    draw the loss over a rising learning rate: cait find-lr --config FILE
  find-batch   the largest batch that fits into memory: cait find-batch --config FILE
  shards     pack a data set into chunks, to train from a folder or S3: cait shards DIR OUT
  imagenet-check   count a data folder, decode a sample: cait imagenet-check DIR [--images 2000]

`cait fit --paper table1/layerscale-36` trains a row of the paper, `cait validate --paper ...`
scores it. You can override each setting of the row.

`cait fit --help` lists the settings that runs use most, `cait fit --help=all` every one,
`cait fit --help=model` the fields of the network; `cait VERB --help` the options of a verb.
`cait fit --config FILE --print_config` shows what a run would use. You can give everything
in a YAML file on the command line too: --model.lr 1e-3
`source <(cait --print_completion bash)` completes verbs, settings and runs; zsh likewise.
"""

# Each verb is imported only when it is asked for: `cait --help` and `cait zoo` never wait for Lightning.
VERBS = {
    "fit": "cait.cli.fit:fit",
    "resume": "cait.cli.fit:resume",
    "eval": "cait.cli.evaluate:evaluate",
    "validate": "cait.cli.evaluate:validate",
    "test": "cait.cli.evaluate:test",
    "predict": "cait.cli.predict:predict",
    "export": "cait.cli.export:export",
    "demo": "cait.extras.demo.verb:demo",
    "card": "cait.extras.hub.card:card",
    "push": "cait.extras.hub.push:push",
    "consolidate": "cait.extras.fsdp.consolidate:consolidate",
    "visualize": "cait.extras.visualize.verb:visualize",
    "plot": "cait.extras.visualize.plot:plot",
    "runs": "cait.extras.runs.verb:runs",
    "compare": "cait.extras.visualize.compare:compare",
    "replay": "cait.extras.replay.verb:replay",
    "zoo": "cait.extras.paper.zoo:show",
    "paper": "cait.extras.paper.verb:show",
    "study": "cait.extras.study.verb:show",
    "sweep": "cait.extras.sweep.verb:sweep",
    "find-lr": "cait.extras.find.verb:find_lr",
    "find-batch": "cait.extras.find.verb:find_batch",
    "shards": "cait.extras.shards.verb:shards",
    "imagenet-check": "cait.extras.datacheck.verb:imagenet_check",
}


def main(
    argv: list[str] | None = None,
    *,
    module: type[CaiTModule] | None = None,
    data: type[ImageNetDataModule] | None = None,
) -> None:
    """Run `cait`.

    Args:
        argv: verb and options; None takes the process's arguments.
        module: a subclass of `CaiTModule` to use instead of it, in every verb.
        data: a subclass of `ImageNetDataModule` to use instead of it, in every verb.
    """
    # Set before torch is loaded. CPU threads that spin while they wait make a run five to twenty times slower if
    # another job uses the same cores. Alone they are up to 1.5 times faster: set OMP_WAIT_POLICY=ACTIVE if you know
    # that nothing else runs.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # A process that ends breaks the others' connections. For each one torch would print a C++ stack trace.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if not sys.flags.safe_path and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # `my_file:thing` is found beside logs/
    argv = sys.argv[1:] if argv is None else argv
    rundir.script = sys.argv[0] if module or data else None
    if isinstance(sys.stdout, TextIOWrapper) and sys.stdout.errors == "strict":
        with suppress(OSError):  # somebody has replaced the file below
            sys.stdout.reconfigure(errors="surrogateescape")  # file names may be no text
    try:
        _run(argv, module, data)
        sys.stdout.flush()
    except (KeyboardInterrupt, BrokenPipeError, SystemExit) as error:
        # Lightning turns a KeyboardInterrupt into a SystemExit after the run has said what to type next. rich turns a
        # BrokenPipeError into one.
        cause = error.__context__ if isinstance(error, SystemExit) else error
        if isinstance(cause, KeyboardInterrupt):
            if error is cause:
                print("cait: interrupted", file=sys.stderr)
            raise SystemExit(130) from None
        if isinstance(cause, BrokenPipeError):  # the reader has gone, as in `cait zoo | head -1`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at the interpreter's end
            raise SystemExit(141) from None
        raise
    except Exception as error:
        told = of_file(error) if isinstance(error, OSError) else error
        if launch.watch:
            _end(launch.watch, told or error)
        if not isinstance(told, UserError):
            raise
        training = argv[:1] in (["fit"], ["resume"])
        _stop(launch.tell(str(told)) if training else str(told))


def _run(argv: list[str], module: type[CaiTModule] | None, data: type[ImageNetDataModule] | None) -> None:
    if not argv or argv[0] in ("-h", "--help"):
        print(HELP, end="")
        return
    if argv[0] == "--version":
        print(f"cait {cait.__version__}")
        return
    verb, rest = argv[0], argv[1:]
    if verb == "--print_completion":
        from cait.cli.completion import script

        print(script(rest, VERBS))
        return
    if verb not in VERBS:
        alike = {"train": "fit", "validation": "validate"}.get(verb)
        hint = f"; did you mean {alike}?" if alike else did_you_mean(verb, VERBS, "; `cait --help` lists them")
        raise UserError(f"unknown verb {verb!r}{hint}")
    if verb == "fit":
        from cait.cli import help

        topic = help.topic(rest)
        if topic in ("fit", "model"):
            print(help.FIT if topic == "fit" else help.fields())
            return
        rest = ["--help"] if topic else rest
    sys.argv[1:] = argv  # the processes that Lightning starts for DDP repeat this command line
    room, _, name = VERBS[verb].partition(":")
    getattr(import_module(room), name)(rest, module, data)


def _end(watch: Watch, error: Exception) -> NoReturn:
    """End one of several processes: say the first cause, and nothing about the connections that broke after it."""
    from cait.extras.watch.watch import is_of_the_network

    if isinstance(error, UserError):
        says, status = watch.fail(_line(str(error)), 2), 2
    elif is_of_the_network(error):
        trouble, says = watch.blame(error)
        error, status = UserError(trouble.text), trouble.status
    else:
        says, status = watch.fail(kind_and_place(error)), 1
    if says and isinstance(error, UserError):
        _say(str(error))
    elif says:
        traceback.print_exception(error)
    watch.leave(status)


def _stop(message: str) -> NoReturn:
    _say(message)
    raise SystemExit(2)


def _say(message: str) -> None:
    print(f"cait: error: {_line(message)}", file=sys.stderr, flush=True)


def _line(message: str) -> str:
    # An error from a worker process arrives with the worker's traceback in front of it.
    return message.strip().splitlines()[-1].removeprefix("cait.errors.UserError: ")

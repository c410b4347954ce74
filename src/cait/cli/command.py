"""The command `cait`: a table of its verbs, and what every verb has in common."""

from __future__ import annotations

import os
import sys
import traceback
from contextlib import suppress
from io import TextIOWrapper
from typing import TYPE_CHECKING

import cait
from cait import cores, plugins
from cait.errors import TRACEBACK, OtherEndedError, UserError, did_you_mean, in_a_line, of_own_line, printable, tell
from cait.plugins import Verb
from cait.run.program import Program

if TYPE_CHECKING:
    from cait.data.datamodule import ImageNetDataModule
    from cait.train.module import CaiTModule

HEAD = """\
usage: cait VERB [options]

Train CaiT, "Going deeper with Image Transformers", with PyTorch Lightning.

"""
FOOT = """
`cait fit --help` lists every setting, `cait VERB --help` the options of a verb.
`cait fit --config FILE --print_config` shows what a run would use. You can give everything
in a YAML file on the command line too: --model.lr 1e-3
"""

# A verb's module is imported only when it is asked for: `cait --help` never waits for Lightning.
VERBS = {
    "fit": Verb("cait.cli.fit:fit", "train:              cait fit --config configs/digits.yaml --run_name NAME"),
    "resume": Verb("cait.cli.fit:resume", "continue a run:     cait resume NAME [--trainer.max_epochs 100 ...]"),
    "eval": Verb("cait.cli.evaluate:evaluate", "score a run:        cait eval NAME [--ema.decay null ...]"),
    "predict": Verb(
        "cait.cli.predict:predict",
        "classify images: cait predict NAME FILE|DIR ... [--format table|csv|jsonl]\n"
        "[--top_k K] [--output FILE] [--raw]",
    ),
}
OTHER_NAMES = {"train": "fit", "validate": "eval", "test": "eval"}
"""What people type for a verb."""


def verbs() -> dict[str, Verb]:
    """The verbs of the core, and those of the extras by name."""
    return VERBS | dict(sorted(plugins.by_name("VERBS").items()))


def help_text() -> str:
    """What `cait --help` prints."""
    lines = []
    for name, verb in verbs().items():
        first, *others = verb.help.splitlines()
        lines += [f"  {name:10} {first}", *(f"             {line}" for line in others)]
    return HEAD + "\n".join(lines) + "\n" + FOOT


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
    cores.before_torch()
    argv = sys.argv[1:] if argv is None else argv
    program = Program(module, data, sys.argv[0] if module or data else None)
    try:
        _print_any_name()
        _run(argv, program)
        sys.stdout.flush()
    except (KeyboardInterrupt, BrokenPipeError, SystemExit) as error:
        _end(error)
        if own := of_own_line(error):
            tell(f"cait: error: {own[1]} has ended the run, by sys.exit or as the parser of a command line")
        raise
    except Exception as error:
        if not (told := in_a_line(error)):
            raise
        if os.environ.get(TRACEBACK):
            traceback.print_exception(error)
        print(f"cait: error: {printable(str(told))}", file=sys.stderr, flush=True)
        # Where Lightning has started the processes, this one exits for all.
        is_for_all = isinstance(told, OtherEndedError) and program.processes.started() == 1
        raise SystemExit(UserError.status if is_for_all else told.status) from None


def _print_any_name() -> None:
    """Let file names be printed that are no text, or whose letters the terminal lacks, or where nobody reads them."""
    for name in ("stdout", "stderr"):  # one that the shell has closed is None, and its number would be the next file's
        setattr(sys, name, getattr(sys, name) or open(os.devnull, "w"))  # noqa: SIM115
    if isinstance(sys.stdout, TextIOWrapper) and sys.stdout.errors == "strict":
        is_unicode = sys.stdout.encoding.lower().startswith("utf")
        with suppress(OSError):  # somebody has replaced the file below
            sys.stdout.reconfigure(errors="surrogateescape" if is_unicode else "replace")


def _end(error: BaseException) -> None:
    """Exit as a shell expects if Ctrl-C or a closed pipe is the cause."""
    # Lightning turns a KeyboardInterrupt into a SystemExit after the run has said what to type next. rich turns a
    # BrokenPipeError into one.
    cause = error.__context__ if isinstance(error, SystemExit) else error
    if isinstance(cause, KeyboardInterrupt):
        if error is cause:
            print("cait: interrupted", file=sys.stderr)
        raise SystemExit(130) from None
    if isinstance(cause, BrokenPipeError):  # the reader has gone, as in `cait zoo | head -1`
        cores.discard(sys.stdout)  # for the flush at the interpreter's end
        raise SystemExit(141) from None


def _run(argv: list[str], program: Program) -> None:
    if not argv or argv[0] in ("-h", "--help"):
        print(help_text(), end="")
        return
    if argv[0] == "--version":
        print(f"cait {cait.__version__}")
        return
    try:
        here = os.getcwd()
    except FileNotFoundError as error:
        raise UserError("the working directory has been removed; change into another") from error
    if not sys.flags.safe_path and here not in sys.path:
        sys.path.append(here)  # `my_file:thing` is found beside logs/
    name, rest, known = argv[0], argv[1:], verbs()
    if name not in known:
        meant = OTHER_NAMES.get(name)
        hint = f"; did you mean {meant}?" if meant else did_you_mean(name, known, "; `cait --help` lists them")
        raise UserError(f"unknown verb {name!r}{hint}")
    if not known[name].quick and "torch" not in sys.modules and os.environ.get("LOCAL_RANK", "0") == "0":
        tell("importing PyTorch ...")
    sys.argv[1:] = argv  # the processes that Lightning starts for DDP repeat this command line
    known[name].load()(rest, program)

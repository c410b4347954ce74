"""The command `cait`: a table of its verbs, and what every verb has in common."""

from __future__ import annotations

import os
import sys
import traceback
from contextlib import suppress
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING

import cait
from cait import cores, plugins
from cait.errors import (
    COMMAND,
    OtherEndedError,
    UserError,
    as_typed,
    did_you_mean,
    error_line,
    is_of_worker,
    own_line,
    system_error,
    tell,
    tell_once,
    with_own_line,
)
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
in a YAML file on the command line too: --model.lr 1e-3"""

# A verb's module is imported only when it is asked for: `cait --help` never waits for Lightning.
VERBS = {
    "fit": Verb(
        "cait.cli.fit:fit",
        "train:              cait fit --config configs/digits.yaml --run_name NAME",
    ),
    "resume": Verb(
        "cait.cli.fit:resume", "continue a run:     cait resume NAME [--trainer.max_epochs 100 ...]"
    ),
    "eval": Verb(
        "cait.cli.evaluate:evaluate", "score a run:        cait eval NAME [--ema.decay null ...]"
    ),
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


def _print_help() -> None:
    lines = [HEAD]
    for name, verb in verbs().items():
        indented = verb.help.replace("\n", "\n             ")
        lines.append(f"  {name:10} {indented}")
    print(as_typed("\n".join([*lines, FOOT])))


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
    started = Path(sys.argv[0])
    script = None
    if argv == sys.argv[1:] and started.is_file() and not started.suffix:
        COMMAND.set(started.name)  # as pip installs it
    elif module or data:
        script = sys.argv[0]
    program = Program(module, data, script)
    try:
        _print_any_name()
        _run(argv, program)
        sys.stdout.flush()
    except (KeyboardInterrupt, BrokenPipeError, SystemExit) as error:
        _end(error)
        if line := own_line(error):
            tell(
                f"{COMMAND.get()}: error: {line} has ended the run, by sys.exit or as the parser of a command line"
            )
        raise
    except Exception as error:
        raise SystemExit(_report(error, program)) from None


def _report(error: Exception, program: Program) -> int:
    """Print an error as a line, and return the exit status.

    Where the user's own code or a fault of ours is the cause, its traceback comes before the line.
    """
    known = error if isinstance(error, UserError) else system_error(error)
    line = own_line(error)
    if line or known is None:
        trace = "".join(traceback.format_exception(error))
        for trace_line in trace.splitlines():
            tell(trace_line)
    message = with_own_line(str(known), error) if known else error_line(error)
    message = message.replace("`cait ", as_typed("`cait "))
    notes = getattr(error, "__notes__", None) or getattr(error.__cause__, "__notes__", [])
    program.processes.end("; ".join([message, *notes]))
    if known is None:
        return UserError.status if line or is_of_worker(str(error)) else 1
    # Where Lightning has started the processes, this one exits for all.
    is_for_all = isinstance(known, OtherEndedError) and program.processes.started() == 1
    return UserError.status if is_for_all else known.status


def _print_any_name() -> None:
    """Let file names be printed that are no text, or whose letters the terminal lacks, or where nobody reads them."""
    for name in ("stdout", "stderr"):
        # the shell has closed it, and its number would be the next file's
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
    if isinstance(sys.stdout, TextIOWrapper) and sys.stdout.errors != "replace":
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
            print(f"{COMMAND.get()}: interrupted", file=sys.stderr)
        raise SystemExit(130) from None
    if isinstance(cause, BrokenPipeError):  # the reader has gone, as in `cait zoo | head -1`
        cores.discard(sys.stdout)  # for the flush at the interpreter's end
        raise SystemExit(141) from None


def _run(argv: list[str], program: Program) -> None:
    if not argv or argv[0] in ("-h", "--help"):
        _print_help()
        return
    if argv[0] == "--version":
        print(f"cait {cait.__version__} (PyPI's cait-lightning; its cait is another project)")
        return
    _find_own_modules()
    name, *arguments = argv
    verb = _find_verb(name)
    if not verb.quick and "torch" not in sys.modules:
        tell_once("importing PyTorch ...")
    sys.argv[1:] = argv  # the processes that Lightning starts for DDP repeat this command line
    verb.load()(arguments, program)


def _find_own_modules() -> None:
    """Let `my_file:thing` be imported from beside logs/."""
    try:
        here = os.getcwd()
    except FileNotFoundError as error:
        raise UserError("the working directory has been removed; change into another") from error
    if not sys.flags.safe_path and here not in sys.path:
        sys.path.append(here)


def _find_verb(name: str) -> Verb:
    known = verbs()
    if name not in known:
        hint = did_you_mean(OTHER_NAMES.get(name, name), known, "; `cait --help` lists them")
        raise UserError(f"unknown verb {name!r}{hint}")
    return known[name]

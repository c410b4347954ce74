"""What the verbs have in common on the command line."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NoReturn

from cait import plugins
from cait.errors import UserError, as_typed
from cait.guards.configurations import (
    GROUPS,
    Layer,
    Sources,
    find_config,
    load_group,
    settings,
    typed,
    without_plus,
)
from cait.plugins import Setting
from cait.run import rundir
from cait.run.program import Program
from cait.settings import In, Needs, Settings, flatten

TRUST = "--trust-config"
PRINT_PLAN = "--print-plan"
HELP = {"-h", "--help"}
CHECKPOINTS = Needs(
    "checkpoints", "trainer.enable_checkpointing", lambda enabled: enabled is not False
)
VALIDATION = Needs(
    "validation",
    "trainer.limit_val_batches best_metric",
    lambda share, metric: share != 0 or not (metric or "val").startswith("val"),
)
CLASSES = {"module": "cait.CaiTModule", "data_module": "cait.ImageNetDataModule"}
"""Settings that name classes of the user's own, and what each is a subclass of."""
SETTINGS = [
    *(
        Setting(name, str | None, None, f"package.module:Class, a subclass of {base}; null: that.")
        for name, base in CLASSES.items()
    ),
    Setting(
        "run_name",
        str | None,
        None,
        "Folder in logs/; null: the configuration's name, numbered if taken.",
    ),
    Setting(
        "output", str | None, None, "File of the scores; default evaluation.json.", verbs=["eval"]
    ),
    Setting(
        "save_every_n_minutes",
        float | None,
        10.0,
        "Minutes between checkpoints. Every epoch saves one too.",
        rules=[In("(0, inf)"), CHECKPOINTS],
    ),
    Setting(
        "save_every_n_steps",
        int | None,
        None,
        "Steps between checkpoints; null saves by time and epochs alone.",
        rules=[In("[1, inf)"), CHECKPOINTS],
    ),
    Setting(
        "max_nonfinite_steps",
        int,
        10,
        "Skipped steps in a row, without a finite gradient, that end the run.",
        rules=[In("[1, inf)")],
    ),
    Setting(
        "best_metric",
        str | None,
        None,
        "Metric that chooses best.ckpt, as metrics.csv names it, and so the weights that all verbs use; null: "
        "val/acc1, or val/mAP with several labels per image, of the moving average (val_ema/...) if there is one.",
        rules=[VALIDATION],
    ),
    Setting(
        "best_mode",
        Literal["max", "min"] | None,
        None,
        "Which --best_metric is best; null: as the metric says.",
        rules=[VALIDATION],
    ),
]
"""Settings of a run that no class takes; extras add theirs."""


def settings_of(verb: str) -> list[Setting]:
    """The settings that a verb has beside those of the classes."""
    return [
        setting
        for setting in (*SETTINGS, *plugins.settings())
        if not setting.verbs or verb in setting.verbs
    ]


class Options(argparse.ArgumentParser):
    """Options of a verb, with --help if there is a description; an error is a UserError."""

    def __init__(self, verb: str, description: str = "") -> None:
        super().__init__(
            as_typed(f"cait {verb}"),
            description=description,
            add_help=bool(description),
            allow_abbrev=False,
        )

    def add_trust(self) -> None:
        """Take --trust-config, as `trusted`."""
        self.add_argument(
            TRUST,
            "--trust_config",
            action="store_true",
            dest="trusted",
            help="run the code that a run names and this account has not signed",
        )

    def add_weights(self) -> None:
        """Take what `cait.cli.loading.load_run` needs of a run: `add_trust`, and --raw or --ema as `ema`.

        That is False or True, or None for the weights that chose the checkpoint.
        """
        which = self.add_mutually_exclusive_group()
        which.add_argument(
            "--raw", action="store_false", default=None, dest="ema", help="the raw weights"
        )
        which.add_argument(
            "--ema",
            action="store_true",
            default=None,
            help="their moving average; default: those that chose best.ckpt",
        )
        self.add_trust()

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; `{self.prog} --help` lists what there is")


class Line:
    """The command line of a verb that takes settings: layers of settings, and the words that win over all of them.

    A layer is a file of --config, or what a verb or an extra adds; a later one wins. Words stay as they are typed until
    the parser reads them, because it knows the types of the settings.

    Args:
        verb: "fit" or "eval".
        arguments: the words, those for files among them.
        read: what reads a file of --config.
    """

    def __init__(
        self, verb: str, arguments: list[str], read: Callable[[Path], Settings] = settings
    ) -> None:
        options = Options(verb)
        options.add_argument("-c", "--config", action="append", default=[])
        for group in GROUPS:
            options.add_argument(f"--{group}", action="append", default=[])
        files, self.words = options.parse_known_args(arguments)
        self.verb = verb
        self.layers: list[Layer] = [(path, read(path)) for path in map(find_config, files.config)]
        """Settings as values, with the file that they are from, if any."""
        for group in GROUPS:
            self.layers += [(None, {group: load_group(text)}) for text in vars(files)[group]]
        self.steps: list[Callable[[Settings], Settings]] = []
        """Functions from the settings that are given, by name, to those to add."""

    def take_classes(self, program: Program) -> None:
        """Let the program have the classes that the line names, unless it has others.

        Raises UserError if one cannot be imported, or is of another kind.
        """
        options = Options(self.verb)
        for name in CLASSES:
            options.add_argument(f"--{name}", default=argparse.SUPPRESS)
        named: Settings = {}
        for _, layer in self.layers:
            named |= layer
        named |= vars(options.parse_known_args(self.words)[0])
        for name in CLASSES:
            if named.get(name) not in (None, "null"):
                program.take_class(name, named[name])

    def extend(self, program: Program) -> None:
        """Let extras add to it, such as the row of a table."""
        self.take_classes(program)
        for add_settings in plugins.of_kind("add_settings"):
            add_settings(self, program)

    @property
    def sources(self) -> Sources:
        """Where its settings come from."""
        return Sources([*(without_plus(flatten(layer)) for _, layer in self.layers), self.typed])

    @property
    def typed(self) -> set[str]:
        """The names of the settings that are typed."""
        return typed(self.words)


def split_flag(flag: str, arguments: list[str]) -> tuple[bool, list[str]]:
    """(whether a flag is given, with dashes or as "--trust_config", the other arguments)"""
    others = [argument for argument in arguments if argument.replace("_", "-") != flag]
    return len(others) < len(arguments), others


def split_run(verb: str, arguments: list[str]) -> tuple[Path, list[str]]:
    """(the folder of the run that comes first, the other arguments). Raises UserError if none is named, or there."""
    if not arguments or not arguments[0] or arguments[0].startswith("-"):
        raise UserError(f"which run? `cait {verb} NAME`; runs are the folders in {rundir.LOGS}/")
    return rundir.folder_of(arguments[0]), arguments[1:]

"""`cait paper`, and the rows of the paper's tables: each is a run that one command starts, with published results.

The tables are data, `tables/<table>.yaml`; `Row` says what a row may hold.
"""

import contextlib
import functools
from dataclasses import dataclass, field
from pathlib import Path

from rich.table import Table

from cait import CONFIGS, disk
from cait.cli.options import Line, Options
from cait.errors import UserError, did_you_mean, table_console, to_type
from cait.extras import curves
from cait.guards import configurations
from cait.model.config import CaiTConfig, variant_config
from cait.run import rundir
from cait.run.program import Program
from cait.settings import Settings, as_text, flatten, listed, nested

TABLES = Path(__file__).parent / "tables"
RECIPE = CONFIGS / "imagenet" / "xxs24_224.yaml"
"""What every row starts from. A row names only its differences."""
FIELDS = "model.fields."
WHAT = "List the rows of the paper's tables: what differs, published and reproduced accuracy, and how to run one."


@dataclass(frozen=True)
class Row:
    """A row of a table. Everything else in its YAML is a setting, by its name on the command line."""

    table: str
    name: str
    changes: Settings = field(default_factory=dict)
    """The settings that the row itself names."""
    base: str | None = None
    """Row, as [table/]row, whose settings it takes over."""
    weights_of: str | None = None
    """Row whose weights it starts from: it has that row's network and another recipe."""
    overlay: str | None = None
    """File in `configs/` that goes on top of the recipe."""
    evaluate: bool = False
    """Train nothing; score the weights of `weights_of`."""
    top1: float | None = None
    """Published top-1 on ImageNet in percent."""
    failed: bool = False
    """The published run broke down before its end."""
    parameters: float | None = None
    """Published, in millions."""
    gflops: float | None = None
    """Published, in 10⁹ multiply-adds."""

    @property
    def id(self) -> str:
        return f"{self.table}/{self.name}"

    @property
    def run_dir(self) -> Path:
        return rundir.LOGS / f"{self.table}-{self.name}"

    @property
    def differs(self) -> str:
        """What the row sets, in words."""
        words = [f"{key.split('.')[-1]} {as_text(value)}" for key, value in self.changes.items()]
        if self.evaluate:
            words.insert(0, "evaluated")
        if self.overlay:
            words.insert(0, Path(self.overlay).stem)
        if self.weights_of:
            words.insert(0, f"weights of {self.weights_of}")
        if self.base:
            words.insert(0, f"as {self.base}")
        return ", ".join(words)

    @property
    def command(self) -> str:
        if self.evaluate:
            return to_type(f"make eval PAPER={self.id}", f"cait eval --paper {self.id}")
        return to_type(f"make train PAPER={self.id}", f"cait fit --paper {self.id}")

    @property
    def settings(self) -> Settings:
        """All differences of the run from the recipe and the overlay."""
        if self.weights_of:
            others = row_named(self.weights_of, self.table).settings
            settings = {
                key: others[key] for key in others if key.startswith(("model.name", FIELDS))
            }
        elif self.base:
            settings = row_named(self.base, self.table).settings
        else:
            settings = flatten(tables()[self.table].get("defaults", {}))
        appended = {
            name: [*listed(settings.get(name)), *listed(value)]
            for name, value in self.changes.items()
            if name.endswith("+")
        }
        return settings | self.changes | appended

    @property
    def fields(self) -> Settings:
        """The fields of the network that the row changes."""
        return {
            key.removeprefix(FIELDS): value
            for key, value in self.settings.items()
            if key.startswith(FIELDS)
        }

    def is_of(self, hparams: Settings) -> bool:
        """Whether a run has the row's network and as many classes as ImageNet, by its module's hyper-parameters."""
        network = (hparams.get("name"), hparams.get("fields") or {}, hparams.get("num_classes"))
        return network == (self.settings["model.name"], self.fields, 1000)

    def layers(self) -> list[configurations.Layer]:
        """The row as layers of a command line, without weights."""
        files = [RECIPE]
        if self.overlay:
            files.append(CONFIGS / self.overlay)
        return [
            *((file, configurations.settings(file)) for file in files),
            (None, nested(self.settings)),
        ]

    def network(self) -> CaiTConfig:
        settings: Settings = {}
        for _, layer in self.layers():
            settings |= flatten(layer)
        size = settings["data.img_size"]
        rate = settings["model.drop_path_rate"]
        return variant_config(
            settings["model.name"], img_size=size, drop_path_rate=rate, **self.fields
        )


@functools.cache
def tables() -> dict[str, Settings]:
    """The YAML files by their stem."""
    return {file.stem: configurations.settings(file) for file in sorted(TABLES.glob("*.yaml"))}


@functools.cache
def rows() -> dict[str, Row]:
    """Every row by its id."""
    rows = {}
    for table, content in tables().items():
        for name, line in content["rows"].items():
            changes = {key: line[key] for key in line if "." in key}
            about = {key: line[key] for key in line.keys() - changes}
            row = Row(table, name, flatten(changes), **about)
            rows[row.id] = row
    return rows


def row_named(id: str, table: str | None = None) -> Row:
    """A row by its id, or by its name alone within `table`; a UserError if there is none."""
    known = rows()
    full = id if "/" in id else f"{table}/{id}"
    if full not in known:
        raise UserError(
            f"the paper has no row {id!r}{did_you_mean(full, known, '; `cait paper` lists them')}"
        )
    return known[full]


def add_row(line: Line) -> None:
    """Take the settings of the row that `--paper ROW` names; other given settings win.

    Raises UserError if there is no such row, it cannot be trained, or the weights that it starts from are missing.
    """
    options = Options(line.verb)
    options.add_argument("--paper", nargs="?", default="")
    args, line.words = options.parse_known_args(line.words)
    row = row_named(args.paper or "")
    if line.verb == "fit" and row.evaluate:
        raise UserError(f"{row.id} trains nothing, it is scored: `{row.command}`")
    run_name = {"run_name": row.run_dir.name} if line.verb == "fit" else {}
    line.layers[:0] = [*row.layers(), (None, run_name | _weights(line, row))]


def _weights(line: Line, row: Row) -> Settings:
    """The weights that the verb starts from; nothing if the command line names some."""
    if line.typed & {"model.weights", "model.pretrained", "ckpt_path"}:
        return {}
    source = row
    if line.verb == "fit" or row.evaluate:
        if not row.weights_of:
            return {}
        source = row_named(row.weights_of, row.table)
    weights = source.run_dir / rundir.CHECKPOINTS / rundir.LAST
    if not weights.exists() and "print_config" not in line.typed:
        raise UserError(
            f"{row.id} needs the weights of {source.id}, and there is no {weights}: "
            f"`{source.command}` first, or give --model.weights FILE"
        )
    settings: Settings = {}
    if source is row:  # its run is read whole, because its moving average is scored too
        settings["ckpt_path"] = str(weights)
    else:
        settings["model"] = {"weights": str(weights)}
    if line.verb == "eval":
        settings["output"] = str(row.run_dir / rundir.EVALUATION)
    return settings


def show(arguments: list[str], program: Program) -> None:
    """Print the rows of a table, or of all."""
    options = Options("paper", WHAT)
    options.add_argument("table", metavar="TABLE", nargs="?", help="default all")
    args = options.parse_args(arguments)
    if args.table and args.table not in tables():
        raise UserError(
            f"the paper has no table {args.table!r} here; choose one of {', '.join(tables())}"
        )
    examples: dict[bool, str] = {}
    screen = table_console(180)
    for table in [args.table] if args.table else tables():
        grid = Table(title=tables()[table]["title"], title_justify="left")
        grid.add_column("row", no_wrap=True)
        grid.add_column("what differs")
        grid.add_column("paper", justify="right")
        grid.add_column("reproduced")
        for row in rows().values():
            if row.table == table:
                top1 = ("" if row.top1 is None else f"{row.top1}") + ("†" if row.failed else "")
                grid.add_row(row.id, row.differs, top1, _reproduced(row))
                examples.setdefault(row.evaluate, row.command)
        screen.print(grid)
    screen.print("paper: top-1 on ImageNet in percent; † the run broke down before its end.")
    for is_scored, command in sorted(examples.items()):
        screen.print(f"{'score' if is_scored else 'train'} a row: {command}", soft_wrap=True)


def _reproduced(row: Row) -> str:
    """The last accuracy of the row's run in logs/, if that is of the row's network, else "not run"."""
    if row.evaluate:
        shape = {"model": str, "class_names": [str], "raw": {"acc1": (int, float)}}
        with contextlib.suppress(OSError, UserError):
            scored = disk.read_json(row.run_dir / rundir.EVALUATION, shape)
            if scored["model"] == row.settings["model.name"] and len(scored["class_names"]) == 1000:
                return f"{scored['raw']['acc1']:.2f}"
        return "not run"
    with contextlib.suppress(OSError, UserError):
        trained = configurations.settings(row.run_dir / "hparams.yaml")
        scored = [line for line in curves.rows(row.run_dir).values() if "val/acc1" in line]
        if scored and row.is_of(trained):
            return f"{scored[-1]['val/acc1']:.2f} after {int(scored[-1]['epoch']) + 1} epochs"
    return "not run"

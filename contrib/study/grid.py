"""The runs of a study, as a grid file lists them: methods by depth, and places of the class token."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from cait import CONFIGS, disk, plugins
from cait.errors import UserError, did_you_mean, one_line
from cait.guards import configurations
from cait.settings import Settings
from contrib.runner import arguments_of, refuse_chosen

GRID = Path(__file__).with_name("grid.yaml")
PLACES_DEPTH = 12


@dataclass(frozen=True)
class StudyRun:
    """One run of the study."""

    method: str
    depth: int
    seed: int
    settings: Settings
    paper: str | None = None
    """The paper's row that it repeats, as "table1/layerscale-36"; the paper may have no row of this depth."""
    is_place: bool = False
    """Whether it is of Table 2, not of Table 1."""

    @property
    def name(self) -> str:
        return (
            f"{self.method}-seed{self.seed}"
            if self.is_place
            else f"{self.method}-{self.depth}-seed{self.seed}"
        )


class Grid:
    """The runs of a grid file. Raises UserError if the file is missing or not a grid, or it has no such size.

    Args:
        path: the file; `grid.yaml` beside this module says what stands in one.
        data: folder to train on; None takes the embedded digits.
        more: further arguments of every run.
    """

    def __init__(
        self,
        path: Path = GRID,
        size: str = "quick",
        data: str | None = None,
        more: Sequence[str] = (),
    ) -> None:
        try:
            self._content = content = configurations.settings(path)
            base = content["data" if data else "digits"]
            if size not in content["sizes"]:
                hint = did_you_mean(
                    size, content["sizes"], f"; it has {', '.join(content['sizes'])}"
                )
                raise UserError(f"{path} has no size {size!r}{hint}")
            self._chosen = content["sizes"][size]
            disk.check_shape(self._chosen, {"depths": [int], "seeds": int}, path, f"sizes.{size}")
            self.config = CONFIGS / base["config"]
            self._base = [base["settings"], content["every_run"]]
            if data:
                self._base.append({"data.root": data})
            self._more = list(more)
            if monitor := plugins.extras().get("monitor"):
                self._more[:0] = [
                    f"--trainer.callbacks+={monitor.__name__}.callback.Monitor",
                    f"--trainer.callbacks.every_n_steps={int(base['monitor_every_n_steps'])}",
                ]
            self.runs = [*self._methods(), *self._places()]
            if not self.runs:
                raise UserError(f"{path}: the size {size} has no runs")
            refuse_chosen(
                more, "seed_everything", *(name for run in self.runs for name in run.settings)
            )
        except OSError as error:
            raise UserError(f"cannot read the grid {path}: {one_line(error)}") from error
        except (KeyError, TypeError, AttributeError) as error:
            raise UserError(
                f"{path} is not a grid of a study: {type(error).__name__} {error}"
            ) from error

    @property
    def base(self) -> Settings:
        """What all runs share, by name."""
        return {name: value for layer in self._base for name, value in layer.items()}

    def _methods(self) -> Iterable[StudyRun]:
        rates = self._content["drop_path_rate"]
        known = self._content["methods"]
        for seed in range(self._chosen["seeds"]):
            # Deep runs first: the last to end is then a short one.
            for depth in sorted(self._chosen["depths"], reverse=True):
                for method in self._chosen.get("methods", known):
                    settings = dict(known[method])
                    paper = settings.pop("paper", None)
                    is_adapted = settings.pop("adapted", True)
                    settings["model.fields.depth"] = depth
                    settings["model.drop_path_rate"] = rates[depth if is_adapted else min(rates)]
                    yield StudyRun(method, depth, seed, settings, paper and f"{paper}-{depth}")

    def _places(self) -> Iterable[StudyRun]:
        known = self._content["places"]
        plain = {
            "model.fields.residual": "plain",
            "model.fields.depth": PLACES_DEPTH,
            "model.drop_path_rate": self._content["drop_path_rate"][PLACES_DEPTH],
        }
        for seed in range(self._chosen["seeds"]):
            for place in self._chosen.get("places", known):
                settings = plain | known[place]
                yield StudyRun(
                    place,
                    settings["model.fields.depth"],
                    seed,
                    settings,
                    f"table2/{place}",
                    is_place=True,
                )

    def originals(self) -> dict[str, StudyRun]:
        """By each run's name, the first run with the same settings and seed: only that one is trained."""
        first: dict[tuple[str, ...], StudyRun] = {}
        return {
            run.name: first.setdefault(tuple(sorted(self.arguments(run))), run) for run in self.runs
        }

    def arguments(self, run: StudyRun) -> list[str]:
        """Arguments of `cait fit` for a run, besides `config` and its folder."""
        seed = {"seed_everything": run.seed}
        return [*arguments_of(*self._base, run.settings, seed), *self._more]

"""The recipe that `cait fit --data.root DIR` chooses for a folder: each rule with its reason, from top to bottom.

The rules read the folder's figures, the machine's, and what the user has given. They never choose a setting that is
given, and the later rules take it as it is. `choose` shows the order. The numbers were found by trials on 2 cores, see
benchmark.md.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from cait import plugins
from cait.errors import UserError, to_type
from cait.extras.recipe.anatomy import Anatomy, look
from cait.extras.recipe.survey import MINUTES, Machine, Survey
from cait.extras.recipe.trial import Pace, Trial, devices_of
from cait.extras.recipe.weights import Weights
from cait.extras.words import duration
from cait.model.config import VARIANTS

SMALL = 64
"""Images up to this size, in pixels, are trained on as they are."""
SIZES = (224, 192, 160, 128, 96, 64)
"""Sizes that networks other than the recipe's own may see, in pixels."""
LEAST = 128
"""The least size for weights, to which smaller ones are enlarged: at 96 features lose more than epochs gain."""
ENOUGH = {"scratch": 25.0, "weights": 3.0}
"""Epochs that should fit in the time at the size that is chosen."""
RATES = {"muon": 6e-3, "lion": 3e-4, "lamb": 5e-3, "sgd": 0.05, "nesterov": 0.05, "momentum": 0.05}
"""Peak rates of optimizers that are given, by the end of their name; Adam and its like take 1e-3."""
GENTLE = 1e-4
"""Peak rate of AdamW after a solved head."""
HEAD_RATE = 1e-2
"""Peak rate of AdamW where the head alone learns by steps; 0.001 learned less in trials, and 0.03 hardly more."""
COPIES = "data/cache/copies"
FEW = 20
"""With fewer training images of a class than this, more images help more than any setting."""
LONG = 2
"""From this median aspect ratio on, a square crop shows half of an image at most."""
PLAIN: dict[str, Any] = {"data.auto_augment": None, "data.cutmix": 0.0, "data.mixup": 0.0, "model.label_smoothing": 0.0}
LITTLE = PLAIN | {"data.scale": [0.5, 1.0]}
MIXED: dict[str, Any] = {"data.cutmix": 1.0, "data.mixup": 0.2, "model.label_smoothing": 0.1}
MILD = MIXED | {"data.auto_augment": None, "data.scale": [0.7, 1.0], "data.mix_prob": 0.2}
STRONG = MIXED | {"data.auto_augment": "rand-m6-mstd0.5-inc1", "data.scale": [0.35, 1.0], "data.mix_prob": 0.3}
"""Augmentation from weights, in whose few epochs nothing is learned by heart; of small grey images; of others."""
UNEVEN, RARE = 3.0, 10.0
"""Ratios of the largest class to the smallest from which classes are drawn more evenly, and equally often: at the
square root a network learns to leave out a rare class."""


@dataclass
class Recipe:
    """The settings by their names on the command line, and a line for each rule that chose some."""

    given: Mapping[str, Any]
    weights: Weights | None = None
    minutes: float = MINUTES
    settings: dict[str, Any] = field(default_factory=dict)
    lines: list[tuple[str, str]] = field(default_factory=list)

    def take(self, setting: str, value: Any) -> Any:
        """Choose `value` unless the user has given one, or an earlier rule has chosen. Returns what holds."""
        if setting in self.given:
            return self.given[setting]
        return self.settings.setdefault(setting, value)

    def get(self, setting: str, otherwise: Any) -> Any:
        """The value so far."""
        return self.given.get(setting, self.settings.get(setting, otherwise))

    def note(self, topic: str, text: str) -> None:
        self.lines.append((topic, text))

    def held(self) -> dict[str, Any]:
        """All settings so far, those that are given and those that are chosen."""
        return self.settings | dict(self.given)

    def look(self, size: int) -> Anatomy | None:
        """What the network so far is made of, if it takes images of `size` pixels."""
        return look(self.held(), size)

    @property
    def trains_head_alone(self) -> bool:
        return self.get("model.freeze", False) is True

    @property
    def solves_head(self) -> bool:
        """Whether the run solves a head before the first step, which is an extra's work. A run of ours brings one."""
        settings = {each.name for group in plugins.groups("model") for each in fields(group)}
        is_new = self.weights is not None and "data.img_size" not in self.weights.settings
        return is_new and "solve_head" in settings and self.get("model.solve_head", True)

    @property
    def is_cait(self) -> bool:
        return self.get("model.name", "xxs24") in VARIANTS


def choose(
    folder: Survey,
    machine: Machine,
    given: Mapping[str, Any],
    measure: Trial,
    weights: Weights | None = None,
    minutes: float = MINUTES,
) -> Recipe:
    """The recipe for a folder. Raises UserError if it holds too little to learn from."""
    if folder.images < 4:
        raise UserError(f"{folder.images} training images are too few to learn from; collect {FEW} of each class")
    recipe = weigh(folder, start(Recipe(given, weights, minutes)), measure)
    warn(folder, recipe)
    size = resolution(folder, machine, recipe, measure)
    halve(folder, machine, recipe, size)
    network(machine, recipe, size)
    augment(folder, recipe)
    batch = steps(folder, machine, recipe)
    optimize(recipe, size)
    length(folder, machine, recipe, batch, measure)
    balance(folder, recipe)
    return recipe


def start(recipe: Recipe) -> Recipe:
    """Take the network, the image size and the normalisation that the weights were learned with."""
    if recipe.weights is not None:
        for setting, value in recipe.weights.settings.items():
            recipe.take(setting, value)
        recipe.note("weights", recipe.weights.name)
    return recipe


def weigh(folder: Survey, recipe: Recipe, measure: Trial) -> Recipe:
    """Leave weights that tell less of the images than the pixels do, unless they were asked for; and say so.

    They were learned on photographs. From a drawing, a letter or a microscope's image a network of its own learns more.
    """
    weights = recipe.weights
    if weights is None or not recipe.solves_head or folder.several is not None:
        return recipe
    if (found := measure.domain(recipe)) is None or found[0] >= found[1]:
        return recipe
    less = f"logistic regression reaches {found[0]:.0f} % on their features, and {found[1]:.0f} % on the pixels"
    if weights.by_default and "model.name" not in recipe.given:
        recipe = Recipe(recipe.given, None, recipe.minutes)
        recipe.note("weights", f"none: of {weights.name} {less}, so the network starts from scratch")
    else:
        recipe.note(
            "weights", f"{less}: from scratch ({to_type('FROM=none', '--from none')}) a run is likely to end higher"
        )
    return recipe


def warn(folder: Survey, recipe: Recipe) -> None:
    """Say so if there are too few images for any recipe to help, or if square crops lose most of what they show."""
    name, count = min(folder.counts.items(), key=lambda item: item[1])
    if count < FEW:
        few = f"{counted(count, 'training image')} in class {name}: at least {FEW} are needed for a fair result"
        recipe.note("warning", few)
    if folder.val < 100:
        share = 100 / folder.val
        recipe.note("warning", f"{folder.val} validation images: one of them is {share:.1f} points of val/acc1")
    if folder.aspect >= LONG and recipe.get("data.fit", "crop") == "crop":
        shape = f"half of the images are at least {folder.aspect:.1f} times as long as they are wide"
        recipe.note("warning", f"{shape}, and a crop is square; --data.fit pad or squash keeps their ends")


def counted(count: int, what: str) -> str:
    return f"{count:,} {what}{'s' * (count != 1)}"


def resolution(folder: Survey, machine: Machine, recipe: Recipe, measure: Trial) -> int:
    """Keep small images as they are. Shrink photographs while their subject still shows: time grows with the area."""
    is_small = folder.side <= SMALL
    if not recipe.weights:
        recipe.take("data.mean", list(folder.mean))
        recipe.take("data.std", list(folder.std))
    if "data.img_size" in recipe.held():
        size, reason = 1, "as given" if "data.img_size" in recipe.given else "that of the weights"
    elif recipe.weights or not recipe.is_cait:
        found = as_they_are(folder, recipe) if is_small and not recipe.weights else None
        size, reason = found or as_time_allows(folder, recipe, measure)
    elif is_small:
        size, reason = 8 * max(2, math.ceil(folder.side / 8)), "as the images are"  # so that patches of 8 fit
    elif machine.gpus:
        size, reason = 128, "a GPU has the time for it"
    else:
        size, reason = 64, "twice the size takes four times as long"
    size = recipe.take("data.img_size", size)
    recipe.note("size", f"{size} pixels, {reason}")
    return size


def as_they_are(folder: Survey, recipe: Recipe) -> tuple[int, str] | None:
    """The size of small images, or the next that the network takes; with attention at least 6 patches a side."""
    for step in (4, 8, 16, 32):
        size = step * math.ceil(folder.side / step)
        if (anatomy := recipe.look(size)) is None:
            continue
        if not anatomy.attention or size >= 6 * anatomy.patch:
            return size, "as the images are, or the next size that the network takes"
        if recipe.look(larger := 6 * anatomy.patch):
            return larger, f"because patches of {anatomy.patch} pixels would be too few"
    return None


def as_time_allows(folder: Survey, recipe: Recipe, measure: Trial) -> tuple[int, str]:
    """The largest size with which enough epochs fit, or the smallest that the network takes.

    Weights have seen large images. Their features of small ones are worse, which more epochs do not make good, so these
    are enlarged, to twice their size. A head that is solved needs one pass without gradients, a third of an epoch.
    """
    sizes, enough = [*SIZES], ENOUGH["scratch"]
    if recipe.weights:
        sizes = [size for size in SIZES if LEAST <= size <= max(LEAST, 2 * folder.side)]
        enough = 1 / 3 if recipe.trains_head_alone else ENOUGH["weights"]
    time = 0.9 * 60 * recipe.minutes - 2 * measure.begun()  # the start again takes as long; a tenth is validation
    fitting: dict[int, float] = {}
    for size in sizes:
        if (seconds := measure.step(recipe, size)) is not None:
            fitting[size] = max(time, 6 * recipe.minutes) / (seconds * folder.images)
            if fitting[size] >= enough:
                return size, f"the largest at which {math.ceil(enough)} epochs fit"
    if not fitting:
        return SIZES[0], "the usual size: the network cannot be measured"
    if recipe.solves_head and fitting[min(fitting)] < 1:
        leave_at_head(recipe, fitting[min(fitting)])
        return max((size for size in fitting if fitting[size] >= 1 / 3), default=min(fitting)), "enough for the head"
    return min(fitting), "the smallest that the network takes"


def leave_at_head(recipe: Recipe, fitting: float) -> None:
    """Train nothing but the head, because less than an epoch of the rest fits."""
    if "model.freeze" not in recipe.held():
        recipe.take("model.freeze", True)
        more = f"--minutes {math.ceil(recipe.minutes * 5 / fitting)}"
        recipe.note("frozen", f"all but the head, because not one epoch fits; {more} would give 5")


def halve(folder: Survey, machine: Machine, recipe: Recipe, size: int) -> None:
    """Halve large images as they are read, to twice what the network sees, and keep copies.

    A photograph takes longer to read than to learn from.
    """
    gain = 2 if folder.side >= 4 * size else 20  # most images are halved, or only a few huge ones
    if folder.megapixels >= gain * copied(2 * size):
        recipe.take("data.shrink", 2 * size)
    if (shrink := recipe.get("data.shrink", None)) is None:
        return
    megabytes = (folder.images + folder.val) * 3 * min(folder.megapixels, copied(shrink))
    fits = megabytes < 1000 * machine.free / 4
    place = recipe.take("data.copies_dir", COPIES if fits else None)
    without = "no copies are kept" if fits else "there is no room for copies"
    keeps = f"{place} keeps copies ({megabytes:,.0f} MB)" if place else without
    recipe.note("reading", f"images are halved down to {shrink} pixels; {keeps}")


def copied(shrink: int) -> float:
    """Megapixels of an image that was halved down to `shrink`: its sides are up to twice as long."""
    return 3 * shrink**2 / 1e6


def network(machine: Machine, recipe: Recipe, size: int) -> None:
    """CaiT, shallow for so little data: a few blocks learn faster than 24.

    LayerScale starts at 1: it is there for depth, and a few blocks are not deep. On a CPU, convolutions that pool see
    the details in less time than blocks, and leave few tokens to them: see benchmarks/stems.md.
    """
    gpus, name, convolves = machine.gpus, recipe.take("model.name", "xxs24"), False
    if not recipe.is_cait or recipe.weights:
        return
    width, depth = (VARIANTS[name][field] for field in ("embed_dim", "depth"))
    if name == "xxs24":
        convolves = not gpus and recipe.take("model.fields.stem", "pooled") != "patch"
        width = recipe.take("model.fields.embed_dim", 192 if gpus else 96 if convolves else 128)
        depth = recipe.take("model.fields.depth", 12 if gpus else 1 if convolves else 4)
        recipe.take("model.fields.num_heads", 4)
        if not gpus:
            recipe.take("model.fields.layer_scale_init", 1.0)
            recipe.take("model.fields.mlp_ratio", 2.0 if convolves else 4.0)
        recipe.take("model.drop_path_rate", 0.1 if gpus else 0.0)
    whole = [patch for patch in range(1, size + 1) if size % patch == 0]
    if convolves:
        fitting = max(patch for patch in whole if patch.bit_count() == 1 and (size // patch >= 4 or patch == 1))
    else:
        fitting = min(patch for patch in whole if size // patch <= (16 if gpus else 8))
    patch = recipe.take("model.fields.patch_size", fitting)
    blocks, count = counted(recipe.get("model.fields.depth", depth), "block"), (size // patch) ** 2
    width = recipe.get("model.fields.embed_dim", width)
    after = " after convolutions, which are not the paper's" if convolves else ""
    recipe.note("network", f"CaiT of {blocks}, {width} wide, {count} patches of {patch} × {patch} pixels{after}")


def augment(folder: Survey, recipe: Recipe) -> None:
    """Photographs may be mirrored, cropped and recoloured; grey ones not recoloured: brightness is all they have.

    Grey images may be letters or digits, which are others in a mirror. The few images of a rare class are drawn so
    often that the network would learn them by heart, so they are changed more, grey or not.
    """
    if recipe.weights:
        chosen, more, why = LITTLE, [], " alone, because the run is short"
    elif folder.grey and (folder.side <= SMALL or folder.unevenness < RARE):
        chosen, more, why = MILD, ["a little Mixup"], ""
    else:
        chosen, more = STRONG, ["RandAugment", "some Mixup"]
        why = ", because few images are drawn often" if folder.grey else ""
    for setting, value in {"data.repeats": 1, "data.erase_prob": 0.0, **chosen}.items():
        recipe.take(setting, value)
    mirror = recipe.take("data.hflip", 0.0 if folder.grey else 0.5)
    done = ", ".join(["crops", "mirror", *more] if mirror else ["crops", *more])
    hint = "--data.hflip 0 if left and right matter"
    if not mirror:
        hint = "no mirror, because grey images may be letters or digits: --data.hflip 0.5 if left and right are alike"
    recipe.note("augment", f"{done}{why}; {hint}")


def steps(folder: Survey, machine: Machine, recipe: Recipe) -> int:
    """Images per step: 64, on a GPU 128, from weights 32; fewer if an epoch would have under 8 steps, which train."""
    wanted = 32 if recipe.weights else 128 if machine.gpus else 64
    pairs = 2 * devices_of(recipe.given)  # each process pairs images for Mixup
    batch = recipe.take("data.batch_size", max(1, min(wanted, folder.images // 8) // pairs) * pairs)
    recipe.take("data.global_batch", True)
    recipe.take("data.eval_batch_size", max(16, min(128, folder.val // (4 * machine.cores))))  # so that all cores read
    if machine.gpus:
        recipe.take("trainer.devices", 1)  # more would gain nothing on so small a network
    if machine.fast_bf16:
        recipe.take("trainer.precision", "bf16-mixed")
    return batch


def optimize(recipe: Recipe, size: int) -> None:
    """Muon learns in half the steps of AdamW on networks of matrices. Given weights must change only slowly.

    Its steps on wide convolutions take longer than the network itself, and the running statistics of BatchNorm lag
    behind steps so large: see benchmark.md.
    """
    recipe.take("model.lr_base_size", None)
    if recipe.solves_head:
        recipe.take("model.solve_head", True)
    if "model.optimizer" in recipe.given:
        name = str(recipe.given["model.optimizer"])
        rate = RATES.get(re.split("[:_.]", name.lower())[-1], 1e-3) / (20 if recipe.weights else 1)
        note = f"{name} as given, at RATE"
    elif recipe.solves_head:
        recipe.take("model.freeze_norm", True)
        rate, note = GENTLE, "the head is solved first; then AdamW at RATE, BatchNorm as the weights have it"
        note = "none: the head is solved" if recipe.trains_head_alone else note
    elif recipe.trains_head_alone:
        rate, note = HEAD_RATE, "AdamW at RATE, which suits a head that learns alone"
    elif recipe.weights:
        recipe.take("model.layer_decay", 0.75)
        rate, note = 3e-4, "AdamW at a low rate, lower layers slower: the weights know much already"
    elif recipe.is_cait or ((anatomy := recipe.look(size)) and anatomy.matrices >= 0.5):
        recipe.take("model.optimizer", "muon")
        rate, note = RATES["muon"], "Muon at RATE, which learned twice as fast as AdamW in trials"
    elif anatomy:
        rate, note = 2e-3, "AdamW at RATE: most weights are in convolutions, where Muon takes long"
    else:
        rate, note = 1e-3, "AdamW at RATE, which suits most networks"
    recipe.note("optimizer", note.replace("RATE", f"{recipe.take('model.lr', rate):g}"))


def length(folder: Survey, machine: Machine, recipe: Recipe, batch: int, measure: Trial) -> None:
    """As many epochs as the time allows, up to 200 or 4000 steps: a small folder gains nothing from more.

    Validation takes at most 15 % of the time, and comes at most 30 times.
    """
    if recipe.given.keys() & {"trainer.max_steps", "trainer.max_time", "trainer.fast_dev_run"}:
        return
    recipe.take("trainer.log_every_n_steps", max(1, min(10, folder.images // batch)))
    pace = measure.run(recipe) or Pace(image=0.01, validation=1.0)
    if recipe.solves_head:  # on features, which take a third of a step's time
        pace = replace(pace, start=pace.start + folder.images * pace.image / 3)
    most = 30 if recipe.weights else min(200, max(10, 4000 * batch // folder.images))
    fitting, validations = pace.plan(recipe.minutes, folder.images, most)
    if fitting < 1 and recipe.solves_head:
        leave_at_head(recipe, fitting)
    elif fitting < 1 and "trainer.max_epochs" not in recipe.given:
        recipe.take("trainer.max_steps", max(1, int(fitting * folder.images / batch)))
    epochs = recipe.take("trainer.max_epochs", max(1, int(fitting)))
    # The last epoch must be validated, whatever number was given.
    every = max(count for count in range(1, max(1, epochs // validations) + 1) if epochs % count == 0)
    every = recipe.take("trainer.check_val_every_n_epoch", every)
    recipe.take("model.warmup_epochs", min(5.0, max(0.1, round(epochs / 10, 1))))
    on = counted(machine.gpus, "GPU") if machine.gpus else counted(machine.cores, "core")
    if recipe.trains_head_alone and recipe.solves_head:
        recipe.note("length", f"no epoch: the head is solved on {on}")
        return
    seconds = pace.seconds(min(epochs, fitting), folder.images, epochs / every)
    about = duration(10 * max(1, round(seconds / 10)))
    what = counted(epochs, "epoch") + (f", validated every {every}" if every > 1 else "")
    if part := recipe.settings.get("trainer.max_steps"):
        what = f"{part:,} steps, less than an epoch"
    limit = f"; no more than {most}, whatever the time" if epochs == most else ""
    recipe.note("length", f"{what}: about {about} on {on}, measured just now{limit}")
    if fitting < 10 and not recipe.weights and "trainer.max_epochs" in recipe.settings:
        more = f"--minutes {math.ceil(recipe.minutes * 30 / fitting)}"
        recipe.note("warning", f"{folder.images:,} images are many for this machine; {more} would give 30 epochs")


def balance(folder: Survey, recipe: Recipe) -> None:
    """Classes of very different sizes are drawn more evenly, and the mean over the classes picks the best epoch."""
    per_class = recipe.take("model.per_class", True)
    weighted = folder.several is not None or recipe.get("model.class_weights", None) is not None
    if folder.unevenness < UNEVEN or weighted:
        return
    how = recipe.take("data.balance", "sqrt" if folder.unevenness < RARE else "full")
    if per_class is True:
        recipe.take("best_metric", "val/acc1_macro")
    most, least = (pick(folder.counts, key=lambda name: folder.counts[name]) for pick in (max, min))
    sizes = f"{most} has {counted(folder.counts[most], 'image')}, {least} {folder.counts[least]:,}"
    chosen = f"best.ckpt is chosen by {recipe.get('best_metric', 'val/acc1')}"
    recipe.note("balance", f"{sizes}: small classes are drawn more often ({how}), and {chosen}")

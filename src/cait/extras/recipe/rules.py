"""The recipe that `cait fit --data.root DIR` chooses for a folder: each rule with its reason, in the order of `choose`.

No rule chooses a setting that is given. The numbers were found by trials on 2 cores, see benchmark.md.
"""

import math
from typing import Any

from cait import plugins
from cait.errors import UserError
from cait.extras.display import duration
from cait.extras.recipe.figures import (
    EPOCH,
    OVERHEAD,
    SETUP,
    Machine,
    Survey,
    Trial,
    devices_of,
    most_epochs,
)
from cait.extras.recipe.weights import CHANNELS, INTERMEDIATES, Weights
from cait.model.config import VARIANTS
from cait.references import TIMM, is_path
from cait.settings import Settings
from cait.train.metrics import metric_of_best

SMALL = 64
"""Images up to this size, in pixels, are trained on as they are."""
SIZES = (64, 96, 128, 160, 192, 224)
"""Sizes that networks other than the recipe's own may see, in pixels."""
LEAST = 128
"""The least size for weights, to which smaller ones are enlarged: at 96 features lose more than epochs gain."""
LOWER = 0.33
"""The share of the layers that stays in a run from weights on a CPU; without gradients they take less than half."""
FEW = 20
"""With fewer training images of a class than this, more images help more than any setting."""
ONCE: Settings = {"data.repeats": 1, "data.erase_prob": 0.0}
UNMIXED = ONCE | {"data.cutmix": 0.0, "data.mixup": 0.0, "model.label_smoothing": 0.0}
LITTLE = UNMIXED | {"data.auto_augment": None, "data.scale": [0.5, 1.0]}
MIXED = ONCE | {"data.cutmix": 1.0, "data.mixup": 0.2, "model.label_smoothing": 0.1}
MILD = MIXED | {"data.auto_augment": None, "data.scale": [0.7, 1.0], "data.mix_prob": 0.2}
STRONG = MIXED | {
    "data.auto_augment": "rand-m6-mstd0.5-inc1",
    "data.scale": [0.35, 1.0],
    "data.mix_prob": 0.3,
}
"""Augmentation from weights, in whose few epochs nothing is learned by heart; of small gray images; of others."""
SHALLOW: Settings = {
    "model.fields.embed_dim": 128,
    "model.fields.depth": 4,
    "model.fields.layer_scale_init": 1.0,
    "model.fields.mlp_ratio": 4.0,
    "model.fields.num_heads": 4,
    "model.drop_path_rate": 0.0,
}
POOLED = SHALLOW | {
    "model.fields.embed_dim": 96,
    "model.fields.depth": 1,
    "model.fields.mlp_ratio": 2.0,
}
DEEP: Settings = {
    "model.fields.embed_dim": 192,
    "model.fields.depth": 12,
    "model.fields.num_heads": 4,
    "model.drop_path_rate": 0.1,
}
"""The network of patches on a CPU; that of a stem which pools; that on a GPU."""
UNEVEN, RARE = 3.0, 10.0
"""Ratios of the largest class to the smallest from which classes are drawn more evenly, and equally often: at the
square root a network learns to leave out a rare class, but not a head that is solved."""


class Recipe:
    """The settings by their names on the command line, and a line for each rule that chose some."""

    def __init__(self, given: Settings, weights: Weights | None, minutes: float) -> None:
        self.given = given
        self.weights = weights
        self.minutes = minutes
        self.held = dict(given)
        """All settings so far, those that are given and those that are chosen."""
        self.lines: list[tuple[str, str]] = []
        self.image: float | None = None
        """Seconds that the network trains on an image, once it is measured."""

    @property
    def settings(self) -> Settings:
        """Those that are chosen."""
        return {name: value for name, value in self.held.items() if name not in self.given}

    def take(self, setting: str, value: Any) -> Any:
        """Choose `value` unless the user has given one, or an earlier rule has chosen. Returns what holds."""
        return self.held.setdefault(setting, value)

    def take_all(self, settings: Settings) -> None:
        self.held = {**settings, **self.held}

    def note(self, topic: str, text: str) -> None:
        self.lines.append((topic, text))

    @property
    def trains_head_alone(self) -> bool:
        return self.held.get("model.freeze") is True

    @property
    def holds_lower_layers(self) -> bool:
        return isinstance(self.held.get("model.freeze"), float)

    @property
    def solves_head(self) -> bool:
        """Whether the run solves a head before the first step, which is an extra's work.

        Not from a run of ours, whose settings have a size: it knows too little for that, see benchmark.md.
        """
        is_new = self.weights is not None and "data.img_size" not in self.weights.settings
        return (
            is_new and "pretrained" in plugins.extras() and self.held.get("model.solve_head", True)
        )

    @property
    def is_cait(self) -> bool:
        return self.held.get("model.name", "xxs24") in VARIANTS


def choose(
    folder: Survey,
    machine: Machine,
    given: Settings,
    measure: Trial,
    weights: Weights | None,
    minutes: float,
) -> Recipe:
    """The recipe for a folder. Raises UserError if it holds too little, or the weights are another network's."""
    if folder.images < 4:
        raise UserError(
            f"{folder.images} training images are too few to learn from; collect {FEW} of each class"
        )
    recipe = Recipe(given, weights, minutes)
    if weights:
        recipe.take_all(weights.settings)
        transfer(machine, recipe, measure, measure.takes_head(recipe.held, len(folder.counts)))
        recipe.note("weights", weights.name)
    name = min(folder.counts, key=folder.counts.__getitem__)
    count = folder.counts[name]
    if count < FEW:
        recipe.note(
            "warning",
            f"class {name} has {count} training images; a fair result needs at least {FEW} of each",
        )
    precision(machine, recipe, measure)
    size = resolution(folder, machine, recipe, measure)
    halve(folder, recipe, size)
    network(machine, recipe, size)
    augment(folder, recipe)
    batch = steps(folder, machine, recipe)
    optimize(recipe)
    length(folder, machine, recipe, batch, measure)
    balance(folder, recipe)
    return recipe


def transfer(machine: Machine, recipe: Recipe, measure: Trial, takes_head: bool) -> None:
    """A new head of a timm network sees every stage. On a CPU the lower layers stay, for twice as many steps.

    Of images with channels that the weights have never seen the first layer has to learn.
    """
    if not recipe.solves_head or not recipe.held.get("model.name", "").startswith(TIMM):
        return
    network = measure.built(recipe.held | {INTERMEDIATES: True})
    if network is not None and not takes_head:
        recipe.take(INTERMEDIATES, True)
    if (
        not machine.gpus
        and recipe.held.get(CHANNELS, 3) in (1, 3)
        and hasattr(network or measure.built(recipe.held), "group_matcher")
    ):
        recipe.take("model.freeze", LOWER)


def precision(machine: Machine, recipe: Recipe, measure: Trial) -> None:
    """bfloat16 where it is fast; a CPU's units for it are of no use to convolutions of single channels."""
    if machine.fast_bf16 and (
        machine.gpus or recipe.is_cait or not measure.has_depthwise(recipe.held)
    ):
        recipe.take("trainer.precision", "bf16-mixed")


def resolution(folder: Survey, machine: Machine, recipe: Recipe, measure: Trial) -> int:
    """Keep small images as they are. Shrink photographs while their subject still shows: time grows with the area."""
    if not recipe.weights:
        recipe.take_all({"data.mean": [*folder.mean], "data.std": [*folder.std]})
    if "data.img_size" in recipe.held:
        size = recipe.held["data.img_size"]
        reason = "as given" if "data.img_size" in recipe.given else "that of the weights"
    elif recipe.weights or not recipe.is_cait:
        size, reason = as_time_allows(folder, recipe, measure)
    elif folder.side <= SMALL:
        size = 8 * max(2, math.ceil(folder.side / 8))  # so that patches of 8 fit
        reason = "as the images are"
    elif machine.gpus:
        size = 128
        reason = "a GPU has the time for it"
    else:
        size = 64
        reason = "twice the size takes four times as long"
    size = recipe.take("data.img_size", size)
    recipe.note("size", f"{size} pixels, {reason}")
    return size


def as_time_allows(folder: Survey, recipe: Recipe, measure: Trial) -> tuple[int, str]:
    """The largest size with which enough epochs fit, or the smallest that the network takes.

    Weights have seen large images. Their features of small ones are worse, which more epochs do not make good, so these
    are enlarged, to twice their size. From `LEAST` on, more epochs gain more than larger images, until all have run. A
    head that is solved needs one pass without gradients, a third of an epoch.
    """
    least = SIZES[0]
    most = folder.side
    enough = 25.0
    if recipe.weights:
        least = LEAST
        most *= 2
        enough = float(most_epochs(True, 1))
    time = 0.9 * 60 * recipe.minutes - measure.begun() - SETUP  # a tenth is validation
    largest: int | None = None
    for size in SIZES:
        if not least <= size <= max(least, most):
            continue
        seconds = measure.step(recipe.held, size)
        if seconds is None:
            continue
        fitting = max(time, 6 * recipe.minutes) / (seconds * folder.images)
        if largest is None and recipe.solves_head and fitting < 1:
            leave_at_head(recipe, fitting)
        if recipe.weights and recipe.trains_head_alone:
            enough = 1 / 3
        if largest is not None and fitting < enough:
            break
        largest = size
        recipe.image = seconds
        is_enough = fitting >= enough
    if largest is None:
        return SIZES[-1], "the usual size: the network cannot be measured"
    if recipe.trains_head_alone:
        return largest, "enough for the head"
    if is_enough:
        return largest, f"the largest at which {enough:g} epochs fit"
    return largest, "the smallest that the network takes"


def leave_at_head(recipe: Recipe, fitting: float) -> None:
    """Train nothing but the head, because less than an epoch of the rest fits."""
    if "model.freeze" not in recipe.given and not recipe.trains_head_alone:
        recipe.held["model.freeze"] = True
        minutes = math.ceil(recipe.minutes * 5 / fitting)
        recipe.note(
            "frozen",
            f"all but the head, because not one epoch fits; --minutes {minutes} would give 5 epochs",
        )


def halve(folder: Survey, recipe: Recipe, size: int) -> None:
    """Halve large images as they are read, to twice what the network sees: a photograph takes longer to read."""
    shrink = recipe.take("data.shrink", 2 * size)
    if shrink and folder.side >= 2 * shrink:
        recipe.note("reading", f"large images are halved down to {shrink} pixels")


def network(machine: Machine, recipe: Recipe, size: int) -> None:
    """CaiT, shallow for so little data: a few blocks learn faster than 24.

    LayerScale starts at 1: it is there for depth, and a few blocks are not deep. On a CPU, convolutions that pool see
    the details in less time than blocks, and leave few tokens to them.
    """
    gpus = machine.gpus
    name = recipe.take("model.name", "xxs24")
    convolves = False
    if not recipe.is_cait or recipe.weights:
        return
    if name == "xxs24":
        convolves = not gpus and recipe.take("model.fields.stem", "pooled") != "patch"
        fields = SHALLOW
        if convolves:
            fields = POOLED
        elif gpus:
            fields = DEEP
        recipe.take_all(fields)
    if convolves:  # the largest power of two that leaves four patches along a side
        patch = math.gcd(size, 2 ** (max(1, size // 4).bit_length() - 1))
    else:
        most = 16 if gpus else 8  # patches along a side
        patch = next(
            patch for patch in range(1, size + 1) if size % patch == 0 and size // patch <= most
        )
    patch = recipe.take("model.fields.patch_size", patch)
    depth = recipe.held.get("model.fields.depth", VARIANTS[name]["depth"])
    width = recipe.held.get("model.fields.embed_dim", VARIANTS[name]["embed_dim"])
    text = f"CaiT of depth {depth}, {width} wide, {(size // patch) ** 2} patches of {patch} × {patch} pixels"
    if convolves:
        text += " after convolutions, which are not the paper's"
    recipe.note("network", text)


def augment(folder: Survey, recipe: Recipe) -> None:
    """Photographs may be mirrored, cropped and recolored; gray ones not recolored: brightness is all they have.

    Gray images may be letters or digits, which are others in a mirror. The few images of a rare class are drawn so
    often that the network would learn them by heart, so they are changed more, gray or not.
    """
    if recipe.weights:
        settings = LITTLE
        how = "crops and nothing else, because the run is short"
    elif folder.gray and (folder.side <= SMALL or folder.unevenness < RARE):
        settings = MILD
        how = "crops, a little Mixup"
    else:
        settings = STRONG
        how = "crops, RandAugment, some Mixup"
    recipe.take_all(settings)
    mirror = (
        "mirrored" if recipe.take("data.hflip", 0.0 if folder.gray else 0.5) else "not mirrored"
    )
    recipe.note(
        "augment",
        f"{how}; {mirror} (--data.hflip 0 if left and right matter, 0.5 if they are alike)",
    )


def steps(folder: Survey, machine: Machine, recipe: Recipe) -> int:
    """Images per step: 64, on a GPU 128, from weights 32; fewer if an epoch would have under 8 steps, which train."""
    wanted = 128 if machine.gpus else 64
    if recipe.weights:
        wanted = 32
    batches = devices_of(recipe.given) * max(
        1, recipe.given.get("trainer.accumulate_grad_batches", 1)
    )
    pairs = 2 * batches  # each process pairs images for Mixup
    batch = max(1, min(wanted, folder.images // 8) // pairs) * pairs
    recipe.take("data.global_batch", True)
    # for all cores
    recipe.take("data.eval_batch_size", max(16, min(128, folder.val // (4 * machine.cores))))
    if machine.gpus:
        recipe.take("trainer.devices", 1)  # more would gain nothing on so small a network
    return recipe.take("data.batch_size", batch)


def optimize(recipe: Recipe) -> None:
    """Muon learns in half the steps of AdamW on networks of matrices. Given weights must change only slowly.

    Its steps on wide convolutions take longer than the network itself, and the running statistics of BatchNorm lag
    behind steps so large: see benchmark.md.
    """
    recipe.take("model.lr_base_size", None)
    if recipe.solves_head:
        recipe.take_all({"model.solve_head": True, "model.freeze_norm": True})
        head = "the head, which sees every stage," if recipe.held.get(INTERMEDIATES) else "the head"
        stays = "the lower layers and BatchNorm" if recipe.holds_lower_layers else "BatchNorm"
        rate = 3e-4
        note = f"{head} is solved first; then AdamW at RATE, {stays} as the weights have it"
        if recipe.trains_head_alone:
            note = "none: the head is solved"
    elif recipe.weights:
        if not is_path(recipe.held.get("model.name", "xxs24")):  # one's own may name no layers
            recipe.take("model.layer_decay", 0.75)
        rate = 3e-4
        note = "AdamW at a low rate, lower layers slower: the weights know much already"
    elif recipe.is_cait and "model.optimizer" not in recipe.given:
        recipe.take("model.optimizer", "muon")
        rate = 6e-3
        note = "Muon at RATE, which learned twice as fast as AdamW in trials"
    else:
        rate = 1e-3
        note = "AdamW, or what is given, at RATE, which suits most networks"
    recipe.note("optimizer", note.replace("RATE", f"{recipe.take('model.lr', rate):g}"))


def length(folder: Survey, machine: Machine, recipe: Recipe, batch: int, measure: Trial) -> None:
    """As many epochs as the time allows by the pace of a few steps, up to `most_epochs`.

    Validation takes at most 15 % of the time, and comes at most 30 times.
    """
    if recipe.given.keys() & {"trainer.max_steps", "trainer.max_time", "trainer.fast_dev_run"}:
        return
    recipe.take("trainer.log_every_n_steps", max(1, min(10, folder.images // batch)))
    measured = recipe.image or measure.step(recipe.held, recipe.held["data.img_size"]) or 0.01
    image = OVERHEAD * measured / devices_of(recipe.held)
    forward = image / (2 if recipe.holds_lower_layers else 3)  # lower layers go forward alone
    start = measure.begun() + SETUP
    if recipe.solves_head:
        start += folder.images * forward
    epoch = folder.images * image + EPOCH
    validation = folder.val * forward
    if recipe.held.get("ema.decay") is not None:  # the average is scored too
        validation *= 2
    fitting = max(60 * recipe.minutes - start, 20 * recipe.minutes) / (
        epoch + min(validation, 0.18 * epoch)
    )
    is_planned = "trainer.max_epochs" not in recipe.given
    if fitting < 1 and recipe.solves_head:
        leave_at_head(recipe, fitting)
        if recipe.trains_head_alone:  # the run says that it trains no epoch
            recipe.take("trainer.max_epochs", 1)
            return
    if fitting < 1 and is_planned:
        recipe.take("trainer.max_steps", max(1, int(fitting * folder.images / batch)))
    elif is_planned:
        recipe.take("plan_minutes", recipe.minutes)
    most = most_epochs(bool(recipe.weights), folder.images / batch)
    whole = recipe.held.get("trainer.max_epochs") or min(most, max(1, int(fitting)))
    apart = max(1, min(whole, max(math.ceil(whole / 30), math.ceil(validation / (0.18 * epoch)))))
    epochs = recipe.take("trainer.max_epochs", whole - whole % apart) or whole
    # the last is validated
    every = next(count for count in range(apart, 0, -1) if epochs % count == 0)
    every = recipe.take("trainer.check_val_every_n_epoch", every) or 1
    recipe.take("model.warmup_epochs", min(5.0, max(0.1, round(epochs / 10, 1))))
    seconds = start + min(epochs, fitting) * epoch + epochs / every * validation
    text = f"epochs: {epochs:,}, validated every {every}"
    if max_steps := recipe.held.get("trainer.max_steps"):
        text = f"{max_steps:,} steps, less than an epoch"
    device = "a GPU" if machine.gpus else f"{machine.cores} cores"
    text += f"; about {duration(10 * max(1, round(seconds / 10)))} on {device}"
    if "plan_minutes" in recipe.settings:
        text += ", planned anew once they are measured"
    if epochs == most:
        text += f"; no more than {most}, whatever the time"
    recipe.note("length", text)


def balance(folder: Survey, recipe: Recipe) -> None:
    """Classes of very different sizes are drawn more evenly, and the mean over the classes picks the best epoch.

    Not from a solved head, which knows rare classes from the start: the mean over so few images of theirs is noise.
    """
    per_class = recipe.take("model.per_class", True)
    is_weighted = folder.several is not None or recipe.held.get("model.class_weights") is not None
    if folder.unevenness < UNEVEN or is_weighted:
        return
    how = None
    if "balance" in plugins.extras():
        is_mild = folder.unevenness < RARE or recipe.solves_head
        how = recipe.take("data.balance", "sqrt" if is_mild else "full")
    has_average = recipe.held.get("ema.decay") is not None
    if per_class is True and not recipe.solves_head:
        recipe.take("best_metric", metric_of_best(None, "acc1_macro", has_average))
    metric = metric_of_best(recipe.held.get("best_metric"), "acc1", has_average)
    counts = folder.counts.values()
    drawn = "all are drawn alike"
    if how is not None:
        drawn = f"small ones are drawn more often ({how})"
    elif "data.balance" in recipe.given:
        drawn = "all are drawn alike, as given"
    recipe.note(
        "balance",
        f"classes have {min(counts):,} to {max(counts):,} images: {drawn}, and best.ckpt is chosen by {metric}",
    )

"""A network for a verb that takes any: that of a run, of a checkpoint, or a named one with weights of its own."""

from pathlib import Path
from typing import Any

from cait.cli.loading import Loaded, checkpoint_of, load_run, readable_names
from cait.cli.options import Options
from cait.errors import UserError
from cait.settings import Settings


def add_options(options: Options) -> None:
    """Take RUN, as `source`, or --name MODEL and its --weights; then --img_size and what a run's weights need."""
    group = options.add_mutually_exclusive_group(required=True)
    group.add_argument(
        "source",
        metavar="RUN",
        nargs="?",
        help="a run in logs/, its folder, or a checkpoint (.ckpt)",
    )
    group.add_argument(
        "--name", metavar="MODEL", help="a network in place of a run, as xxs24 or timm/resnet18"
    )
    options.add_argument(
        "--weights", metavar="FILE", help="its weights; default: those that timm publishes"
    )
    options.add_argument(
        "--img_size", type=int, metavar="PIXELS", help="another resolution: positions are resized"
    )
    options.add_weights()


def chosen(given: Any, purpose: str) -> tuple[Path | None, Path | None]:
    """`checkpoint_of` what the options say; (None, None) if they name a network.

    Raises UserError if they name weights and no network, or no run that is there.
    """
    if given.weights and given.name is None:
        raise UserError("--weights FILE needs the name of its network, as --name timm/resnet18")
    return (None, None) if given.name else checkpoint_of(given.source, purpose)


def load(given: Any, checkpoint: Path | None, folder: Path | None, program: Any) -> Loaded:
    """The network that the options name, or that of the checkpoint that is `chosen`.

    Images are prepared for a named network as timm prepares them for its weights, at their size unless --img_size is
    given.
    """
    if checkpoint:
        return load_run(given, checkpoint, folder, program)
    from cait.data.datamodule import ImageNetDataModule
    from cait.model import network

    known = timm_config(given.name)
    size = given.img_size or (known.input_size[-1] if known else 224)
    num_classes = (known.num_classes if known else None) or 1000
    built = network.create_model(given.name, size, num_classes)
    start = network.InitialWeights(given.weights, pretrained=given.weights is None)
    about = "; ".join(start.load_into(built, given.name))
    data = ImageNetDataModule(img_size=size, **preparation(known))
    return Loaded(built.eval(), given.name, about, readable_names(None, num_classes), data)


def timm_config(name: str, img_size: int = 224) -> Any:
    """timm's configuration of the network `name` and of its published weights; None if it knows no such network."""
    import timm

    from cait.model.weights import published_entry

    entry = published_entry(name, img_size)
    return timm.get_pretrained_cfg(entry) if entry else None


def preparation(config: Any) -> Settings:
    """The settings of a data module that suit the weights of one of timm's configurations, or none for None."""
    if not config:
        return {}
    return {name: getattr(config, name) for name in ("mean", "std", "interpolation", "crop_pct")}


def lower_keys(network: Any, share: float) -> set[str]:
    """Names of the parameters in this share of the layers, from the images on, that a `group_matcher` tells apart."""
    from timm.models import group_parameters

    layers = group_parameters(network, network.group_matcher(coarse=False), reverse=True)
    return {key for key, number in layers.items() if number < share * max(layers.values())}

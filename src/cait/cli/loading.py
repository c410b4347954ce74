"""The network of a run, of a checkpoint or of a file of weights, and how its images are prepared."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from cait import ckpt, disk, references, signature
from cait.cli import saved
from cait.errors import UserError, one_line, printable, tell
from cait.run import rundir
from cait.run.program import Program
from cait.settings import Settings, group


class Loaded(NamedTuple):
    """A network in evaluation mode, and how its images are prepared."""

    network: Any
    name: str
    about: str
    """Where the weights come from."""
    class_names: list[str]
    data: Any
    """A data module, for its evaluation transform; a run's also gives its images."""
    data_state: dict[str, Any] | None = None
    """What the checkpoint says of the run's data."""
    averaged: bool = False
    """Whether the weights are a run's moving average."""
    module: Any = None
    """A run's LightningModule, which holds the network unless it was built again at another size."""

    @property
    def task(self) -> Any:
        """What its labels are, as `cait.train.metrics.OneClass`."""
        from cait.train.metrics import OneClass

        return OneClass(len(self.class_names)) if self.module is None else self.module.task

    @property
    def label_names(self) -> list[str]:
        """What the labels of its images are called: the classes, or sets of them."""
        return getattr(self.data.source, "label_names", self.class_names)

    def validation(self) -> Any:
        """The validation images of the run. Raises UserError if they are not here or have other classes."""
        data = self.data
        data.setup("validate")
        if self.data_state is not None:
            data.load_state_dict(self.data_state)
        if data.num_classes != len(self.class_names):
            raise UserError(
                f"the network knows {len(self.class_names)} classes, {data.root} has {data.num_classes}"
            )
        return data.val_images

    def judge(self, samples: Any) -> Iterator[tuple[Any, Any]]:
        """Probabilities [B, num_classes] on the CPU, and labels [B], by batch; NO_LABEL if an image is unreadable."""
        import torch

        (self.module or self.network).to(device())
        self.data.predict_samples = samples
        for images, labels in self.data.predict_dataloader():
            with torch.inference_mode():
                probabilities = self.probabilities(images.to(device())).cpu()
            yield probabilities, labels

    def probabilities(self, images: Any) -> Any:
        """Those of a batch [B, num_classes], by `CaiTModule.predict_step` if there is a module."""
        if self.module is None:
            return self.task.probabilities(self.network(images))
        return self.module.predict_step((images,), 0)


def load(
    source: str | Path,
    *,
    raw: bool = False,
    trust_config: bool = False,
    module: Any = None,
    data: Any = None,
) -> Any:
    """A trained run, to classify images with: `cait.load("logs/digits").predict("photo.jpg")`.

    Raises UserError if there is no such run, or it cannot be used.

    Args:
        source: the run, as a name in logs/ or a folder, or a checkpoint in it. A run means its best checkpoint.
        raw: take the raw weights even if their moving average chose the checkpoint.
        trust_config: run the code that a run of somebody else names, or one whose config.yaml you have changed. It
            may do anything.
        module: class of the module, a subclass of `cait.CaiTModule`; None takes the run's, if it can be imported.
        data: class of the data module, for its evaluation transform; None takes the run's.

    Returns:
        the `cait.CaiTModule`, in evaluation, on the CPU, with `class_names`, `transform` and `predict`.
    """
    path, folder = checkpoint_of(source, "load")
    with signature.only_own(trust_config):
        loaded = from_checkpoint(path, folder, False if raw else None, None, module, data)
    trained = loaded.module
    trained.class_names = loaded.class_names
    trained.reading = loaded.data.settings
    trained.eval_transform = loaded.data.eval_transform
    return trained


def device() -> Any:
    """The accelerator of this machine, or its CPU."""
    import torch

    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def load_run(
    options: Any,
    checkpoint: Path,
    folder: Path | None,
    program: Program,
    takes_network: bool = True,
) -> Loaded:
    """`from_checkpoint` with the weights and the trust that the options of a verb say, see `Options.add_weights`.

    A verb that `takes_network`, and not the module around it, says what it leaves out of a module of the user's own.
    """
    img_size = vars(options).get("img_size")
    with signature.only_own(options.trusted):
        loaded = from_checkpoint(
            checkpoint, folder, options.ema, img_size, program.module, program.data
        )
    if takes_network:
        tell_left_out(loaded.module, "forward", "predict_step")
    return loaded


def tell_left_out(module: Any, *methods: str) -> None:
    """Say which of these methods of a module of the user's own are left out where its network is taken."""
    if left_out := module.overrides(*methods):
        name = type(module).__name__
        tell(f"this is the network alone, without {' and '.join(left_out)} of {name}")


def checkpoint_of(source: str | Path, purpose: str) -> tuple[Path, Path | None]:
    """A checkpoint, given as a run or as a file, and its run's folder; None if it does not lie in one.

    A UserError names the `purpose`, such as "visualize".
    """
    path = Path(source)
    if path.is_file():
        folder = rundir.find_run(path)
        if folder:
            disk.check_inside(folder)
        return path, folder
    if path.suffix in ckpt.WEIGHTS and not (path.is_dir() or (rundir.LOGS / path).is_dir()):
        ckpt.check_weights(path)
    folder = rundir.folder_of(str(source))
    return rundir.best_checkpoint(folder, purpose), folder


def from_checkpoint(
    path: Path,
    folder: Path | None,
    ema: bool | None = None,
    img_size: int | None = None,
    module: Any = None,
    data: Any = None,
) -> Loaded:
    """Load a run's checkpoint. Images are prepared as in its `folder`, or without one as the checkpoint says.

    Args:
        ema: whether to take the moving average of the weights; None takes what chose best.ckpt.
        img_size: side of the images, to which positions are resized; None takes the checkpoint's.
        module, data: classes in the place of the run's, as `load` takes them.
    """
    from cait.model.network import NetworkSettings, input_shape
    from cait.model.weights import load_weights
    from cait.train.module import CaiTModule

    checkpoint = ckpt.read_checkpoint(path)
    hparams: Any = checkpoint.get("hyper_parameters")
    disk.check_shape(hparams, ckpt.NETWORK, path, "hyper_parameters")
    data_state = ckpt.data_state(checkpoint)
    preprocessing = (data_state or {}).get("preprocessing") or {}
    class_name, *_ = checkpoint.get(ckpt.MODULE) or [""]
    signature.check_code(path, [hparams, preprocessing, class_name], folder)
    averaged = ckpt.uses_average(checkpoint, ema)
    if module is None and references.is_path(class_name):
        module = references.subclass(class_name, CaiTModule)
    lightning_module = _lightning_module(path, checkpoint, averaged, module)
    network = lightning_module.model
    channels, _, size = input_shape(lightning_module.hparams)
    if img_size not in (None, size):
        size = img_size
        network = group(NetworkSettings, hparams | {"img_size": size}).build_network().eval()
        load_weights(network, path, averaged)
        lightning_module.model = network
    settings = {name: hparams[name] for name in ("mean", "std") if name in hparams}
    if folder:
        settings |= saved.data_settings(folder)
        data = data or saved.data_class(folder)
    else:
        settings |= saved.image_settings(preprocessing)
    settings["img_size"] = size
    # else its own transforms
    settings["in_chans"] = channels if channels == 1 or settings.get("reader") else 3
    data_module = _data_module(data, settings, rundir.config(folder) if folder else path)
    data_module.check_prepares(data_state or {})
    return Loaded(
        network=network,
        name=hparams["name"],
        about=f"{path}{', moving average' if averaged else ''}, step {checkpoint['global_step']:,}",
        class_names=readable_names(ckpt.class_names(checkpoint), hparams["num_classes"]),
        data=data_module,
        data_state=data_state,
        averaged=averaged,
        module=lightning_module,
    )


def _lightning_module(
    path: Path, checkpoint: ckpt.Checkpoint, averaged: bool, module_class: Any
) -> Any:
    """The LightningModule in a checkpoint, in evaluation, built as the checkpoint says."""
    from cait.model.network import at_most
    from cait.train.module import CaiTModule, ModuleSettings

    module_class = module_class or CaiTModule
    weights = ckpt.chosen_weights(checkpoint, path, averaged)
    settings = checkpoint["hyper_parameters"] | {"weights": None, "teacher_path": None}
    try:
        with at_most(checkpoint["state_dict"], settings):
            module = module_class(**saved.init_arguments(module_class, ModuleSettings, settings))
        module.on_load_checkpoint(checkpoint)
        module.load_state_dict(checkpoint["state_dict"])
        module.model.load_state_dict(weights)
    except Exception as error:  # hyper-parameters of someone else's file may cause any error
        raise UserError(
            f"{path} cannot be loaded: {one_line(error) or type(error).__name__}"
        ) from error
    return module.eval()


def _data_module(data_class: Any, settings: Settings, source: Path) -> Any:
    """A data module that prepares images by these settings, which the file `source` holds."""
    from cait.data.datamodule import DataSettings, ImageNetDataModule

    data_class = data_class or ImageNetDataModule
    try:
        return data_class(**saved.init_arguments(data_class, DataSettings, settings))
    except Exception as error:
        raise UserError(
            f"{source} does not say how images are prepared: {one_line(error)}"
        ) from error


def readable_names(names: list[str] | None, num_classes: int) -> list[str]:
    """The names of the classes for the screen: ImageNet's in words, numbers where there are none."""
    from timm.data import ImageNetInfo

    imagenet = ImageNetInfo()
    if names is None and num_classes == imagenet.num_classes():
        names = imagenet.label_names()
    if not names:
        return [f"class {index}" for index in range(num_classes)]
    if names != imagenet.label_names():
        return [*map(printable, names)]
    synonyms = imagenet.label_descriptions()
    words = [text.partition(",")[0] for text in synonyms]
    return [
        word if words.count(word) == 1 else text for word, text in zip(words, synonyms, strict=True)
    ]

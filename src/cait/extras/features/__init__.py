"""Write the features that a network has of images, for other programs, and score simple classifiers on them."""

from cait.plugins import Verb

VERBS = {
    "features": Verb(
        "cait.extras.features.verb:features",
        "features of images:\ncait features NAME|--name MODEL --images DIR --output FILE.npz|.parquet",
    )
}

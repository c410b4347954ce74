"""Share a run on the Hugging Face Hub: its model card, and timm's files beside it."""

from cait.plugins import Verb

VERBS = {
    "card": Verb(
        "cait.extras.hub.card:card",
        "write a run's model card for the Hugging Face Hub: cait card NAME\n[OWNER/NAME], which adds timm's files",
    ),
}

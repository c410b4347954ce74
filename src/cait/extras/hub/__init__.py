"""Share a run: its model card, and the upload to the Hugging Face Hub."""

from cait.plugins import Verb

VERBS = {
    "card": Verb(
        "cait.extras.hub.card:card", "write a run's model card, README.md for the Hugging Face Hub: cait card NAME"
    ),
    "push": Verb(
        "cait.extras.hub.push:push", "put a run on the Hub for timm: cait push NAME OWNER/NAME [--dry-run] [--private]"
    ),
}

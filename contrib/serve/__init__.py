"""A server that classifies the images it is sent: `cait serve`, on LitServe."""

from cait.plugins import Verb

VERBS = {
    "serve": Verb(
        "contrib.serve.verb:serve",
        "answer requests with a run's network:\ncait serve NAME [--port 8000] [--host 0.0.0.0] [--top_k K]",
    )
}

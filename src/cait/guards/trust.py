"""What the files of a run may do without leave: a run's folder may be a stranger's.

A run that names no code needs no leave. One that does needs --trust-config, unless this account has signed its
config.yaml as it is, see `cait.signature`. `resume` and `eval` take all of config.yaml. Other verbs take the weights,
the names of the classes, where the images are and how they are prepared.
"""

import json
import operator
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from cait import signature
from cait.guards import configurations
from cait.run import rundir
from cait.settings import Settings, flatten, listed
from cait.signature import code_in, refuse

FILES = ("config", "data", "ema", "model", "trainer")
"""Settings that, where they are text, name a file of settings."""
ELSEWHERE = re.compile(r"data\.data_dir|\w+_args\b")
"""Settings that say where a run writes or sends something: arguments of what an extra calls are among them."""


def settings(
    path: Path, of_first: Callable[..., str] = operator.call, is_run: bool = False
) -> Settings:
    """The settings in a file of --config, read once: what is checked is what is used.

    `of_first` gives every process what the function returns in the first, which alone needs the key then. Raises
    UserError if it is a run's config.yaml that names code, and is not the user's own. `is_run` says that it is a run's,
    whatever lies beside it.
    """
    text = configurations.read_text(path)
    needs_no_leave = True
    if is_run or rundir.is_of_run(path):
        text, needs_no_leave = json.loads(
            of_first(lambda: json.dumps([text, signature.is_own(text)]))
        )
    config = configurations.settings(path, text)
    if not needs_no_leave:
        refuse(path, code_of_run(config))
    return config


def code_of_run(config: Settings) -> Iterator[str]:
    """What a run's settings name that is code, as `code_in`, and where they would write or send something."""
    yield from code_in(config)
    for name, value in flatten(config).items():
        setting = name.rstrip("+").removeprefix("trainer.")
        is_class = setting in (*FILES, *configurations.CLASSES)
        for text in listed(value):
            if isinstance(text, str) and (
                is_class or (setting in configurations.WORDS and "." in text)
            ):
                yield text
        if value and ELSEWHERE.match(name):
            yield f"{name} {value}"

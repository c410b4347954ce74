"""`cait serve`: a run's network behind HTTP."""

import functools
import multiprocessing
import signal
import socket
from importlib.util import find_spec
from typing import Any

import cait
from cait.cli import loading
from cait.cli.options import Options
from cait.errors import UserError, to_install
from cait.run.program import Program

FAMILIES = {"127.0.0.1": socket.AF_INET, "0.0.0.0": socket.AF_INET, "::": socket.AF_INET6}


def serve(arguments: list[str], program: Program) -> None:
    """Classify what is sent to a port, until Ctrl-C or SIGTERM."""
    given = _options().parse_args(arguments)
    if not 1024 <= given.port <= 65535:
        raise UserError(f"--port must be from 1024 to 65535, got {given.port}")
    if given.top_k is not None and given.top_k < 1:
        raise UserError(f"--top_k must be at least 1, got {given.top_k}")
    if find_spec("litserve") is None:
        raise UserError(f"cait serve needs LitServe: {to_install('[serve]')}")
    own = {"module": program.module, "data": program.data}
    load = functools.partial(loading.load, given.run, raw=given.raw, trust_config=given.trusted, **own)
    module = load()  # here only to refuse a bad run before any process starts, and for what /info says
    about = {"run": given.run, "network": module.hparams["name"], "cait": cait.__version__}
    about |= {"classes": module.class_names, "preprocessing": module.preprocessing}
    del module
    try:
        socket.create_server((given.host, given.port), family=FAMILIES[given.host]).close()
    except OSError as error:
        raise UserError(f"{error.strerror}; name another with --port") from error
    from contrib.serve import server

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _stop)
    host = f"[{given.host}]" if ":" in given.host else given.host
    print(f"{given.run} answers at http://{host}:{given.port} once it is loaded; Ctrl-C stops", flush=True)
    server.run(load, about, given.top_k, given.host, given.port)


def _stop(number: int, frame: Any) -> None:
    """Stop as LitServe does after Ctrl-C, in its main process; the one of requests has answered what is in flight."""
    if multiprocessing.parent_process() is None:
        raise KeyboardInterrupt


def _options() -> Options:
    options = Options("serve", "Classify the images that are sent to POST /predict. A page on / takes a picture.")
    options.add_argument("run", metavar="RUN", help="a run in logs/, its folder, or a checkpoint (.ckpt)")
    options.add_argument("--port", type=int, default=8000, metavar="N", help="default 8000")
    open_to = "0.0.0.0 and :: let other machines in; default 127.0.0.1"
    options.add_argument("--host", choices=FAMILIES, default="127.0.0.1", help=open_to)
    options.add_argument("--top_k", type=int, metavar="K", help="classes of each image; as in cait predict")
    options.add_argument("--raw", action="store_true", help="the raw weights, not their moving average")
    options.add_trust()
    return options

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
    args = _options().parse_args(arguments)
    if not 1024 <= args.port <= 65535:
        raise UserError(f"--port must be from 1024 to 65535, got {args.port}")
    if args.top_k is not None and args.top_k < 1:
        raise UserError(f"--top_k must be at least 1, got {args.top_k}")
    if not find_spec("litserve"):
        raise UserError(f"cait serve needs LitServe: {to_install('[serve]')}")
    load = functools.partial(
        loading.load,
        args.run,
        raw=args.raw,
        trust_config=args.trusted,
        module=program.module,
        data=program.data,
    )
    # here only to refuse a bad run before any process starts, and for what /info says
    module = load()
    about = {
        "run": args.run,
        "network": module.hparams["name"],
        "cait": cait.__version__,
        "classes": module.class_names,
        "preprocessing": module.preprocessing,
    }
    del module
    try:
        socket.create_server((args.host, args.port), family=FAMILIES[args.host]).close()
    except OSError as error:
        raise UserError(f"{error.strerror}; name another with --port") from error
    from contrib.serve import server

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _stop)
    host = f"[{args.host}]" if ":" in args.host else args.host
    print(
        f"{args.run} answers at http://{host}:{args.port} once it is loaded; Ctrl-C stops",
        flush=True,
    )
    server.run(load, about, args.top_k, args.host, args.port)


def _stop(number: int, frame: Any) -> None:
    """Stop as LitServe does after Ctrl-C, in its main process; the one of requests has answered what is in flight."""
    if not multiprocessing.parent_process():
        raise KeyboardInterrupt


def _options() -> Options:
    options = Options(
        "serve", "Classify the images that are sent to POST /predict. A page on / takes a picture."
    )
    options.add_argument(
        "run", metavar="RUN", help="a run in logs/, its folder, or a checkpoint (.ckpt)"
    )
    options.add_argument("--port", type=int, default=8000, metavar="N", help="default 8000")
    options.add_argument(
        "--host",
        choices=FAMILIES,
        default="127.0.0.1",
        help="0.0.0.0 and :: let other machines in; default 127.0.0.1",
    )
    options.add_argument(
        "--top_k", type=int, metavar="K", help="classes of each image; as in cait predict"
    )
    options.add_argument(
        "--raw", action="store_true", help="the raw weights, not their moving average"
    )
    options.add_trust()
    return options

"""Everything that wants a GPU, in three stages of under nine minutes each, into one folder and one archive.

    python benchmarks/gpu.py [--stage tests kernels steps] [--out FOLDER] [--dry]

"tests" holds the kernels against the reference. "kernels" times a layer by every backend. "steps" times
whole training steps beside timm's. Needs torch, timm and pytest; run `benchmarks/gpu.ipynb` where there is a
notebook and no shell. `--dry` runs the same commands without a GPU, on small shapes under Triton's interpreter: it
shows that they run, its figures mean nothing.
"""

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TextIO

import torch
from report import REPO, file_name

SECONDS = 500
FUSED = "contrib/fused/tests/test_fused.py"
TRAINING = (
    ["tests/system/test_gpu.py"]
    if all(map(importlib.util.find_spec, ("lightning", "docstring_parser")))
    else []
)
TESTS = [FUSED, "tests/unit/model/test_cait.py", "tests/oracle/test_cait_timm.py", *TRAINING]
BACKENDS = ["fused", "recompute", "reference"]


def stages(out: Path, dry: bool) -> dict[str, list[tuple[int, list[str]]]]:
    """The commands of each stage with the seconds that each may take at most, the most wanted first."""
    files = ["--out", str(out)]
    kernel, step = "benchmarks/kernel.py", "benchmarks/step.py"
    tax = [step, "--against", "vit", "--backend", *BACKENDS[: 1 if dry else 3], *files]
    if dry:
        tiny = ["--batch", "1", "--rounds", "1"]
        return {
            "tests": [(300, ["-m", "pytest", *TESTS, "-k", "bits_twice or no_image or gpu"])],
            "kernels": [
                (
                    300,
                    [
                        kernel,
                        "--shapes",
                        "2x20",
                        *tiny,
                        "--backends",
                        *BACKENDS,
                        "timm",
                        "sdpa",
                        *files,
                    ],
                )
            ],
            "steps": [
                (300, [*side, "--cases", "xxs24-32", *tiny]) for side in (tax, [step, *files])
            ],
        }
    spread = ["-n", "12"] if importlib.util.find_spec("xdist") else []
    whole = ["--rounds", "7"]
    # by the command line
    torture = [(60, ["benchmarks/torture.py", "--kills", "3", "--accelerator", "gpu"])]
    return {
        "tests": [
            (300, ["-m", "pytest", *spread, "-m", "", "-k", "not 16-", *TESTS]),
            (170, ["-m", "pytest", *spread, "-m", "", "-k", "16-", FUSED]),
            *(torture if importlib.util.find_spec("jsonargparse") else []),
        ],
        "kernels": [
            (200, [kernel, *files]),
            (
                200,
                [
                    kernel,
                    "--shapes",
                    "16x196",
                    "6x196",
                    "16x576",
                    "--batch",
                    "128",
                    *files,
                    "--tag",
                    "others",
                ],
            ),
        ],
        "steps": [
            (150, [*tax, "--batch", "128", "--cases", "s24-224-compiled", *whole, "--tag", "224"]),
            (150, [*tax, "--batch", "32", "--cases", "s24-384-compiled", *whole, "--tag", "384"]),
            (
                120,
                [
                    step,
                    "--batch",
                    "128",
                    "--cases",
                    "s24-224",
                    "s24-224-compiled",
                    *whole,
                    *files,
                    "--tag",
                    "224",
                ],
            ),
            (
                120,
                [
                    step,
                    "--batch",
                    "32",
                    "--cases",
                    "s24-384",
                    "s24-384-compiled",
                    *whole,
                    *files,
                    "--tag",
                    "384",
                ],
            ),
        ],
    }


def run(command: list[str], seconds: float, environment: dict[str, str], log: TextIO) -> str | None:
    """Run it, showing and keeping what it prints; say how it failed, or None."""
    process = subprocess.Popen(
        [sys.executable, "-u", *command],
        cwd=REPO,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    late = threading.Event()

    def stop() -> None:
        late.set()
        os.killpg(process.pid, 9)  # with the processes that it started

    timer = threading.Timer(seconds, stop)
    timer.start()
    for line in process.stdout or ():
        print(line, end="", flush=True)
        log.write(line)
    timer.cancel()
    code = process.wait()
    return (
        f"out of time after {seconds:.0f} s"
        if late.is_set()
        else f"exit code {code}"
        if code
        else None
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = ["tests", "kernels", "steps"]
    parser.add_argument("--stage", nargs="+", default=names, choices=names)
    parser.add_argument(
        "--out", type=Path, help="folder for the results; the archive is put beside it"
    )
    parser.add_argument("--dry", action="store_true", help="without a GPU, on small shapes")
    options = parser.parse_args()
    if not torch.cuda.is_available() and not options.dry:
        print("there is no GPU here: nothing was run; --dry shows that all of it runs")
        return
    out = (options.out or REPO / "benchmarks" / file_name("gpu")).resolve()
    out.mkdir(parents=True, exist_ok=True)
    paths = [str(REPO / "src"), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in paths if path)}
    if options.dry:
        environment |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    failed = []
    for stage in options.stage:
        end = time.monotonic() + SECONDS
        with (out / f"{stage}.log").open("w") as log:
            for seconds, command in stages(out, options.dry)[stage]:
                words = " ".join(command)
                print(f"== {words}", flush=True)
                log.write(f"== {words}\n")
                left = min(seconds, end - time.monotonic())
                reason = run(command, left, environment, log) if left > 10 else "no time left"
                if reason:
                    failed.append(f"{words} ({reason})")
                    log.write(f"== {reason}\n")
        print(
            f"== {stage} done: {shutil.make_archive(str(out), 'gztar', out.parent, out.name)}",
            flush=True,
        )
    if failed:
        raise SystemExit("failed: " + "; ".join(failed))


if __name__ == "__main__":
    main()

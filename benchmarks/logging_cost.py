"""What logging costs late in a long run: the time to log a row of metrics at the start and at the end of many, and to
trim metrics.csv for a resume.

The times are the process's own, so that other work on the machine does not count.
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import time
from pathlib import Path

from report import add, stamp

from cait.run.loggers import RunCSVLogger, run_loggers

ROW = {"train/loss": 6.9, "train/acc1": 0.1, "lr": 1e-3, "epoch": 0.0}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--out", type=Path, help="Markdown file to add the results to")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        line = measure(options.rows, Path(folder) / "run")
    print(f"{stamp()}: {line}")
    add(options.out, line)


def measure(rows: int, folder: Path) -> str:
    folder.mkdir()
    loggers = run_loggers(folder, 0)
    tenth = rows // 10
    times, memory = [], []
    for start in range(0, rows, tenth):
        begin = time.process_time()
        for step in range(start, start + tenth):
            for logger in loggers:
                logger.log_metrics(ROW, step)
        times.append((time.process_time() - begin) / tenth * 1e6)
        memory.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3)
    for logger in loggers:
        logger.finalize("success")
    size = (folder / "metrics.csv").stat().st_size / 1e6
    begin = time.process_time()
    RunCSVLogger(folder, rows - tenth).log_metrics(ROW, rows - tenth)
    trimmed = time.process_time() - begin
    return (
        f"a row takes {times[0]:.0f} µs in the first tenth of {rows:,}, {times[-1]:.0f} µs in the last "
        f"({times[-1] / times[0]:.2f} times; all: {', '.join(f'{t:.0f}' for t in times)}); "
        f"the process has {memory[0]:.0f} MB and {memory[-1]:.0f} MB; a resume trims metrics.csv, {size:.1f} MB, "
        f"in {trimmed:.1f} s"
    )


if __name__ == "__main__":
    main()

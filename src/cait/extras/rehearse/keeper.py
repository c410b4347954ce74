"""Clean up after a rehearsal, however it ends: a program of its own that waits for the end of its standard input.

    python keeper.py FOLDER

Each line of the input is the process group that is at work from now on. The last one is killed, if it is still there,
and FOLDER is removed, if it has a name.
"""

import contextlib
import os
import shutil
import signal
import sys
import time


def main() -> None:
    # scancel sends them to every process of a job
    signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 32))
    group = 0
    for line in sys.stdin:
        group = int(line)
    if group:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
    time.sleep(0.5)  # a process that dies may write there
    shutil.rmtree(sys.argv[1], ignore_errors=True)


if __name__ == "__main__":
    main()

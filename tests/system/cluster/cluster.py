"""A SLURM cluster on one machine: `login`, which has slurmctld, and `n1`, `n2` ..., which compute.

    python tests/system/cluster/cluster.py up DIR 3
    python tests/system/cluster/cluster.py run DIR login sbatch job.sh
    python tests/system/cluster/cluster.py off DIR n2
    python tests/system/cluster/cluster.py down DIR

Each machine is a process in namespaces of its own. So it has its own host name, network address, process numbers and
/tmp, and its own munged and slurmd. DIR/shared is the disk that all have in common. The machines are joined by a
switch inside `login`, so the host's network stays as it is.

It needs root on Linux, and Debian's packages `slurm-wlm munge iproute2`. In a container it needs `--privileged`.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

REPO = Path(__file__).resolve().parents[3]
BOOT = Path(__file__).with_name("boot.sh")
LOGIN = "login"
PROGRAMS = {
    "slurmctld": "slurm-wlm",
    "slurmd": "slurm-wlm",
    "munged": "munge",
    "ip": "iproute2",
    "nsenter": "util-linux",
    "mkfs.ext4": "e2fsprogs",
}
"""What it runs, and Debian's packages that have it."""
NAMESPACES = ("--net", "--mount", "--pid", "--uts", "--ipc")
CORES = 4
"""Of a machine, as SLURM believes."""
PATIENCE = 60.0
"""Seconds in which machines start, and processes end."""


def missing():
    """What this host lacks to run a cluster; empty if it has all."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "root on Linux"
    packages = {package for name, package in PROGRAMS.items() if not shutil.which(name)}
    if packages:
        return f"apt-get install --no-install-recommends {' '.join(sorted(packages))}"
    if subprocess.run(["unshare", *NAMESPACES, "true"], capture_output=True).returncode:
        return "the right to make namespaces (docker run --privileged)"
    return ""


def wait_until(is_true, what, seconds=PATIENCE):
    end = time.monotonic() + seconds
    while not is_true():
        if time.monotonic() > end:
            raise TimeoutError(f"after {seconds:.0f} s still not true: {what}")
        time.sleep(0.1)


def call(*command):
    """Run a command of the system; return what it prints. Raises CalledProcessError if it fails."""
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


class Cluster:
    """The machines whose files are in `folder`. Another process may go on with them.

    Args:
        folder: an absolute path.
        machines: how many compute.
    """

    def __init__(self, folder, machines=2):
        self.folder = folder
        self.shared = folder / "shared"
        self.machines = [f"n{number}" for number in range(1, machines + 1)]

    # Start and end

    def up(self, megabytes=400):
        """Start all machines, with a shared disk of this size."""
        for name in ("shared", "logs", "pids"):
            (self.folder / name).mkdir(parents=True)
        self._write_configuration()
        image = self.folder / "disk.img"
        with image.open("wb") as file:
            file.truncate(megabytes * 2**20)
        call("mkfs.ext4", "-q", image)
        call("mount", "-o", "loop", image, self.shared)
        for name in (LOGIN, *self.machines):
            self.on(name)
        self.wait_until_idle()

    def down(self):
        """End all processes of all machines."""
        for name in (*self.machines, LOGIN):
            self.off(name)
        if os.path.ismount(self.shared):
            call("umount", self.shared)

    def on(self, name):
        """Boot a machine and plug it in."""
        log = (self.folder / "logs" / f"{name}.log").open("a")
        interface = "switch" if name == LOGIN else "eth0"
        boot = [BOOT, self.folder, REPO, name, self.address(name), interface]
        parent = subprocess.Popen(
            ["unshare", *NAMESPACES, "--fork", "--kill-child", "--mount-proc", *boot],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children")
        wait_until(children.read_text, f"{name} has a first process")
        first_process = children.read_text().split()[0]
        (self.folder / "pids" / name).write_text(first_process)
        if name == LOGIN:
            self._link("add switch type bridge")
        else:
            self._link(f"add cable-{name} type veth peer name eth0 netns {first_process}")
            self._link(f"set cable-{name} master switch up")

    def off(self, name):
        """Cut the power: all processes of a machine are killed at once, and send no last word."""
        path = self.folder / "pids" / name
        if not path.exists():
            return
        first_process = int(path.read_text())
        if name != LOGIN:
            with contextlib.suppress(subprocess.CalledProcessError):
                self._link(f"delete cable-{name}")
        with contextlib.suppress(ProcessLookupError):
            os.kill(first_process, signal.SIGKILL)
        wait_until(lambda: not _is_running(first_process), f"{name} has ended")
        path.unlink()

    def unplug(self, name):
        """Pull the cable of a machine out; its processes go on."""
        self._link(f"set cable-{name} down")

    def plug(self, name):
        """Put the cable of a machine in again."""
        self._link(f"set cable-{name} up")

    # Commands on the machines

    def command(self, name, *words, folder=None):
        """The command that runs these words on a machine, in a folder that it has."""
        first_process = (self.folder / "pids" / name).read_text()
        entered = [*NAMESPACES, f"--wdns={folder or self.shared}"]
        return ["nsenter", "--target", first_process, *entered, "--", *map(str, words)]

    def run(self, name, *words, folder=None):
        """Run a command on a machine; return what it prints. Raises CalledProcessError if it fails."""
        return call(*self.command(name, *words, folder=folder))

    def wait_until_idle(self):
        """Wait until all machines are there and none has a job."""

        def is_idle():
            words = ["sinfo", "--noheader", "--Node", "--partition=low", "--format=%t"]
            done = subprocess.run(self.command(LOGIN, *words), capture_output=True, text=True)
            return done.stdout.split() == ["idle"] * len(self.machines)

        wait_until(is_idle, "all machines are idle")

    def _link(self, words):
        """`ip link` with these words, in the network of `login`."""
        first_process = (self.folder / "pids" / LOGIN).read_text()
        call("nsenter", "--target", first_process, "--net", "--", "ip", "link", *words.split())

    # Files

    def address(self, name):
        return f"10.77.0.{[LOGIN, *self.machines].index(name) + 1}"

    def _write_configuration(self):
        hosts = [f"{self.address(name)} {name}" for name in (LOGIN, *self.machines)]
        (self.folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *hosts, ""]))
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        names = ",".join(self.machines)
        for path in Path(__file__).parent.glob("*.conf"):
            shutil.copy(path, self.folder)
        with (self.folder / "slurm.conf").open("a") as file:
            file.write(f"NodeName={names} CPUs={CORES} RealMemory=8000 Gres=gpu:2\n")


def _is_running(process):
    """Whether a process is there, and no zombie."""
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def main(action, folder, *words):
    folder = Path(folder).absolute()
    if action == "up":
        if lack := missing():
            raise SystemExit(f"a cluster needs {lack}")
        Cluster(folder, *map(int, words)).up()
        return
    lines = (folder / "hosts").read_text().splitlines()
    cluster = Cluster(folder, machines=len(lines) - 2)  # but localhost and login
    if action == "run":
        command = cluster.command(*words)
        os.execvp(command[0], command)
    getattr(cluster, action)(*words)


if __name__ == "__main__":
    main(*sys.argv[1:])

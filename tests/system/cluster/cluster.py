"""A SLURM cluster on one machine: `login`, which has slurmctld, and `n1`, `n2` ..., which compute.

    python tests/system/cluster/cluster.py up DIR [--machines 3]
    python tests/system/cluster/cluster.py run DIR login sbatch job.sh
    python tests/system/cluster/cluster.py off DIR n2
    python tests/system/cluster/cluster.py down DIR

Each machine is a process in namespaces of its own. So it has its own host name, network address, process numbers and
/tmp, and its own munged and slurmd. DIR/shared is the disk that all have in common. The machines are joined by a
switch inside `login`, so the host's network stays as it is.

It needs root on Linux, and Debian's packages `slurm-wlm munge iproute2`. In a container it needs `--privileged`.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

REPO = Path(__file__).resolve().parents[3]
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
OWN_FOLDERS = ("/tmp", "/var/tmp", "/run", "/dev/shm", "/etc/slurm")
"""Each machine has these to itself; all else of the host's disk is read by all, as an image of the system is."""
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
    can_divide = subprocess.run(["unshare", *NAMESPACES, "true"], capture_output=True)
    return (
        ""
        if can_divide.returncode == 0
        else "the right to make namespaces (docker run --privileged)"
    )


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

    def __init__(self, folder: Path, machines: int = 2):
        self.folder = folder
        self.shared = folder / "shared"
        self.machines = [f"n{number}" for number in range(1, machines + 1)]

    # Start and end

    def up(self, megabytes: int = 400):
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

    def on(self, name: str):
        """Boot a machine and plug it in."""
        log = (self.folder / "logs" / f"{name}.log").open("a")
        first_words = [sys.executable, __file__, "boot", self.folder, name]
        parent = subprocess.Popen(
            ["unshare", *NAMESPACES, "--fork", "--kill-child", "--mount-proc", *first_words],
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
            self._in_network_of_login("ip", "link", "add", "switch", "type", "bridge")
        else:
            cable = f"cable-{name}"
            link = ["ip", "link", "add", cable, "type", "veth", "peer", "name", "eth0"]
            self._in_network_of_login(*link, "netns", first_process)
            self._in_network_of_login("ip", "link", "set", cable, "master", "switch", "up")

    def off(self, name: str):
        """Cut the power: all processes of a machine are killed at once, and send no last word."""
        path = self.folder / "pids" / name
        if not path.exists():
            return
        first_process = int(path.read_text())
        if name != LOGIN:
            with contextlib.suppress(subprocess.CalledProcessError):
                self._in_network_of_login("ip", "link", "delete", f"cable-{name}")
        with contextlib.suppress(ProcessLookupError):
            os.kill(first_process, signal.SIGKILL)
        wait_until(lambda: not _is_running(first_process), f"{name} has ended")
        path.unlink()

    def unplug(self, name: str):
        """Pull the cable of a machine out; its processes go on."""
        self._in_network_of_login("ip", "link", "set", f"cable-{name}", "down")

    def plug(self, name: str):
        """Put the cable of a machine in again."""
        self._in_network_of_login("ip", "link", "set", f"cable-{name}", "up")

    # Commands on the machines

    def command(self, name: str, *words: str | Path, folder: Path | None = None) -> list[str]:
        """The command that runs these words on a machine, in a folder that it has."""
        first_process = (self.folder / "pids" / name).read_text()
        entered = [*NAMESPACES, f"--wdns={folder or self.shared}"]
        return ["nsenter", "--target", first_process, *entered, "--", *map(str, words)]

    def run(self, name: str, *words: str | Path, folder: Path | None = None) -> str:
        """Run a command on a machine; return what it prints. Raises CalledProcessError if it fails."""
        return call(*self.command(name, *words, folder=folder))

    def wait_until_idle(self):
        """Wait until all machines are there and none has a job."""

        def is_idle() -> bool:
            words = ["sinfo", "--noheader", "--Node", "--partition=low", "--format=%t"]
            done = subprocess.run(self.command(LOGIN, *words), capture_output=True, text=True)
            return done.stdout.split() == ["idle"] * len(self.machines)

        wait_until(is_idle, "all machines are idle")

    def _in_network_of_login(self, *words: str):
        first_process = (self.folder / "pids" / LOGIN).read_text()
        call("nsenter", "--target", first_process, "--net", "--", *words)

    # Inside a machine

    def boot(self, name: str):
        """Be the first process of a machine: set it up, start its daemons, and wait for whom they leave behind."""
        socket.sethostname(name)
        self._mount_own_folders()
        call("mount", "--bind", self.folder / "hosts", "/etc/hosts")
        for path in self.folder.glob("*.conf"):
            os.symlink(path, f"/etc/slurm/{path.name}")
        call("ip", "link", "set", "lo", "up")
        interface = "switch" if name == LOGIN else "eth0"

        def is_plugged_in() -> bool:
            return interface in dict(socket.if_nameindex()).values()

        wait_until(is_plugged_in, f"{name} has {interface}")
        call("ip", "address", "add", f"{self.address(name)}/24", "dev", interface)
        call("ip", "link", "set", interface, "up")
        self.start_munged()
        if name == LOGIN:
            self.start_slurmctld()
        else:
            self._start("slurmd", "-D", "-N", name)
        while True:
            try:
                os.wait()
            except ChildProcessError:
                time.sleep(1)

    def start_munged(self):
        """Start what signs SLURM's messages."""
        os.makedirs("/run/munge", exist_ok=True)
        key = f"--key-file={self.folder / 'munge.key'}"
        # --force: key and folders belong to root
        files = ["--seed-file=/run/munge/seed", "--log-file=/run/munge/log", key]
        self._start("munged", "--foreground", "--force", *files)
        wait_until(Path("/run/munge/munge.socket.2").exists, "munged answers")

    def start_slurmctld(self):
        os.makedirs("/run/slurmctld", exist_ok=True)
        self._start("slurmctld", "-D")

    def _start(self, *words: str):
        log = (self.folder / "logs" / f"{words[0]}-{socket.gethostname()}.log").open("a")
        subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )

    def _mount_own_folders(self):
        """Mount empty folders in place of the host's, and in them again what all machines share."""
        shared = {path: os.open(path, os.O_PATH) for path in (self.folder, REPO)}
        for name in filter(os.path.isdir, OWN_FOLDERS):
            call("mount", "-t", "tmpfs", "-o", "mode=1777", "none", name)
        for path, descriptor in shared.items():
            path.mkdir(parents=True, exist_ok=True)
            hidden = f"/proc/self/fd/{descriptor}"
            subprocess.run(
                ["mount", "--no-canonicalize", "--rbind", hidden, path],
                check=True,
                pass_fds=[descriptor],
            )
            os.close(descriptor)
        os.chmod("/run", 0o755)

    # Files

    def address(self, name: str) -> str:
        return f"10.77.0.{[LOGIN, *self.machines].index(name) + 1}"

    def _write_configuration(self):
        hosts = [f"{self.address(name)} {name}" for name in (LOGIN, *self.machines)]
        (self.folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *hosts, ""]))
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        names = ",".join(self.machines)
        added = [
            f"NodeName={names} CPUs={CORES} RealMemory=8000 Gres=gpu:2",
            f"PartitionName=low Nodes={names} Default=YES PriorityTier=1",
            f"PartitionName=high Nodes={names} PriorityTier=10 PreemptMode=OFF",
        ]
        plain = Path(__file__).with_name("slurm.conf").read_text()
        (self.folder / "slurm.conf").write_text("\n".join([plain, *added, ""]))
        # No GPUs, but a job may ask for some: SLURM wants a file for each.
        (self.folder / "gres.conf").write_text("AutoDetect=off\nName=gpu File=/dev/tty[1-2]\n")
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")


def _is_running(process):
    """Whether a process is there, and no zombie."""
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def main(words):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    actions = parser.add_subparsers(dest="action", required=True)
    for name in ("up", "down", "on", "off", "unplug", "plug", "run", "boot"):
        action = actions.add_parser(name)
        action.add_argument("folder", type=lambda text: Path(text).absolute(), metavar="DIR")
        if name == "up":
            action.add_argument("--machines", type=int, default=2)
        elif name != "down":
            action.add_argument("machine", help="login, n1, n2 ...")
        if name == "run":
            action.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args(words)
    if options.action == "up":
        if lack := missing():
            raise SystemExit(f"a cluster needs {lack}")
        Cluster(options.folder, options.machines).up()
        return
    lines = (options.folder / "hosts").read_text().splitlines()
    cluster = Cluster(options.folder, machines=len(lines) - 2)  # but localhost and login
    if options.action == "run":
        command = cluster.command(options.machine, *options.command)
        os.execvp(command[0], command)
    elif options.action == "down":
        cluster.down()
    else:
        getattr(cluster, options.action)(options.machine)


if __name__ == "__main__":
    main(sys.argv[1:])

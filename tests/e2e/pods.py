"""Pods without Kubernetes: Linux namespaces made as kubelet makes them, for running a chart's containers as they are.

A pod has a network of its own on a bridge, one process namespace where its spec shares it, and volumes; a container has
a root file system of its own, read-only, and runs as the user of its security context without capabilities. So command
lines, ports, paths and environment are those of the chart, unchanged. What a container would find in the image comes
from this machine: /usr and the like, this Python, this source tree. Names are resolved by /etc/hosts, which stands in
for the cluster's DNS. Needs root, `ip`, `nsenter`, `unshare` and `setpriv`; ``missing`` says what is not there.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[2]
GATEWAY = "10.77.0.1"  # the node: where probes come from
_CLONE_NEWNET = 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)
LISTEN = 0x0A


def missing() -> str:
    """Why pods cannot be made here; empty where they can."""
    if os.geteuid() != 0:
        return "needs root"
    for tool in ("ip", "nsenter", "unshare", "setpriv", "chroot", "mount"):
        if shutil.which(tool) is None:
            return f"needs {tool}"
    done = subprocess.run(["unshare", "--net", "--mount", "--pid", "--fork", "true"], capture_output=True, check=False)
    return "" if done.returncode == 0 else "namespaces may not be made here"


def wait_for(what: str, condition: object, timeout_s: float = 60.0, every_s: float = 0.05) -> None:
    """Waits until ``condition()`` is true; AssertionError with ``what`` when it does not come about."""
    end = time.monotonic() + timeout_s
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < end, f"not in {timeout_s:g} s: {what}"
        time.sleep(every_s)


@dataclass(frozen=True)
class Mount:
    """``source`` on this machine, at ``path`` in the container."""

    source: Path
    path: str
    read_only: bool = False


@dataclass(frozen=True)
class ContainerSpec:
    """What kubelet is told, resolved: no references are left in it."""

    name: str
    command: tuple[str, ...]
    env: Mapping[str, str]
    mounts: tuple[Mount, ...]
    user: int = 10001
    group: int = 10001


class Network:
    """A bridge and a hosts file; a context manager that ends everything that was made in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.hosts = folder / "hosts"
        self.hosts.write_text("127.0.0.1 localhost\n")
        self.image = folder / "image"
        _write_image(self.image)
        self.pods: list[Pod] = []
        self._num_pods = 1
        self._names: dict[str, list[str]] = {}
        self._holder: subprocess.Popen[bytes] | None = None
        self._pid: int | None = None

    def __enter__(self) -> Network:
        self._holder = subprocess.Popen(["unshare", "--net", "--kill-child", "--fork", "sleep", "infinity"])
        wait_for("the network's namespace", lambda: _inner(self._holder) is not None)
        self._pid = _inner(self._holder)
        self.run(
            f"ip link add br0 type bridge; ip addr add {GATEWAY}/24 dev br0; ip link set br0 up; ip link set lo up"
        )
        return self

    def __exit__(self, *_: object) -> None:
        for pod in self.pods:
            pod.kill()
        if self._holder is not None:
            _end(self._holder)

    @property
    def pid(self) -> int:
        assert self._pid is not None
        return self._pid

    def run(self, command: str) -> None:
        subprocess.run(["nsenter", "-t", str(self.pid), "-n", "sh", "-ec", command], check=True, timeout=20)

    def next_ip(self) -> str:
        self._num_pods += 1
        return f"10.77.0.{self._num_pods}"

    def name(self, name: str, ips: Sequence[str]) -> None:
        """What ``name`` is resolved to from now on; the file is written in place, for it is mounted everywhere."""
        self._names[name] = list(ips)
        lines = [f"{ip} {each}" for each, addresses in self._names.items() for ip in addresses]
        self.hosts.write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """This thread makes its sockets in the node's network meanwhile."""
        with (
            Path("/proc/thread-self/ns/net").open("rb") as before,
            Path(f"/proc/{self.pid}/ns/net").open("rb") as there,
        ):
            _setns(there.fileno())
            try:
                yield
            finally:
                _setns(before.fileno())

    def connect(self, ip: str, port: int, timeout_s: float = 5.0) -> socket.socket:
        """A connection from the node, as kubelet makes it."""
        with self.inside():
            return socket.create_connection((ip, port), timeout=timeout_s)


@dataclass
class Pod:
    """A running pod. ``seen``: remote (ip, port) of connections that its processes made, by ``look``."""

    network: Network
    name: str
    labels: Mapping[str, str]
    share_processes: bool
    ip: str = ""
    containers: dict[str, Container] = field(default_factory=dict)
    seen: set[tuple[str, int]] = field(default_factory=set)
    listening: set[int] = field(default_factory=set)
    _pause: subprocess.Popen[bytes] | None = None
    _pid: int | None = None

    def start(self) -> None:
        """Its namespaces and its address; no container yet."""
        self.ip = self.network.next_ip()
        reaping = "trap : TERM; while :; do sleep 3600 & wait $!; done"
        self._pause = subprocess.Popen(
            [
                *("unshare", "--net", "--ipc", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"),
                *("bash", "-c", f"hostname {shlex.quote(self.name)}; {reaping}"),
            ]
        )
        wait_for(f"the namespaces of {self.name}", lambda: _inner(self._pause) is not None)
        self._pid = _inner(self._pause)  # once: it walks the machine's processes
        number = self.ip.rpartition(".")[2]
        self.network.run(
            f"ip link add v{number} type veth peer name eth0 netns {self.pid}; ip link set v{number} master br0 up; "
            f"nsenter -t {self.pid} -n sh -ec 'ip link set lo up; ip addr add {self.ip}/24 dev eth0; "
            f"ip link set eth0 up; ip route add default via {GATEWAY}'"
        )
        self.network.pods.append(self)

    @property
    def pid(self) -> int:
        """Of the process that its namespaces live by."""
        assert self._pid is not None, f"pod {self.name} was not started"
        return self._pid

    def run(self, spec: ContainerSpec) -> Container:
        """Starts a container."""
        container = self.containers[spec.name] = Container(self, spec)
        return container

    def look(self) -> None:
        """Notes the connections that there are: those that its processes opened, and the ports that it listens at."""
        found = []
        for table in ("tcp", "tcp6"):
            with contextlib.suppress(OSError):
                found += [_entry(line) for line in Path(f"/proc/{self.pid}/net/{table}").read_text().splitlines()[1:]]
        self.listening |= {local[1] for local, _, state in found if state == LISTEN}
        self.seen |= {
            remote
            for local, remote, state in found
            if state != LISTEN and local[1] not in self.listening and remote[0] not in ("127.0.0.1", self.ip, "0.0.0.0")
        }

    def kill(self) -> None:
        """Ends all its processes at once."""
        for container in self.containers.values():
            container.kill()
        if self._pause is not None:
            _end(self._pause)

    @property
    def running(self) -> bool:
        return self._pause is not None and self._pause.poll() is None


class Container:
    """A container's processes. ``log``: what it printed, both streams."""

    def __init__(self, pod: Pod, spec: ContainerSpec) -> None:
        self.pod = pod
        self.spec = spec
        folder = pod.network.folder / f"{pod.name}.{spec.name}"
        folder.mkdir(exist_ok=True)
        self.log_file = folder / "log"
        setup = folder / "setup.sh"
        setup.write_text(_setup(pod.network, spec, folder / "root"))
        (folder / "root").mkdir(exist_ok=True)
        enter = ["nsenter", "-t", str(pod.pid), "--net", "--ipc", "--uts"]
        own = ["unshare", "--mount", "--kill-child"]
        if pod.share_processes:
            enter += ["--pid"]
            own += ["--fork"]
        else:
            own += ["--pid", "--fork"]
        with self.log_file.open("ab") as log:
            self._outer = subprocess.Popen([*enter, "--", *own, "--", "sh", str(setup)], stdout=log, stderr=log)
        self.started_at = time.monotonic()

    @property
    def log(self) -> str:
        return self.log_file.read_text(errors="replace")

    @property
    def main(self) -> psutil.Process | None:
        """The process that the command line became; None before and after."""
        with contextlib.suppress(psutil.NoSuchProcess, IndexError):
            process = psutil.Process(self._outer.pid)
            while process.name() in ("nsenter", "unshare"):
                process = process.children()[0]
            return process
        return None

    @property
    def status(self) -> int | None:
        """The exit status; None while it runs."""
        return self._outer.poll()

    def exec(self, command: Sequence[str], timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
        """Runs a command in the container, as an exec probe or hook does."""
        main = self.main
        assert main is not None, f"{self.spec.name} of {self.pod.name} does not run:\n{self.log[-3000:]}"
        user, group = self.spec.user, self.spec.group
        entered = ["nsenter", "-t", str(main.pid), "-a", "-r", "-w", "setpriv", f"--reuid={user}", f"--regid={group}"]
        entered += ["--clear-groups", "env", "-i", *(f"{k}={v}" for k, v in self.spec.env.items())]
        return subprocess.run([*entered, *command], capture_output=True, text=True, timeout=timeout_s, check=False)

    def signal(self, number: int) -> None:
        if (main := self.main) is not None:
            main.send_signal(number)

    def wait(self, timeout_s: float) -> int:
        return self._outer.wait(timeout_s)

    def processes(self) -> list[psutil.Process]:
        """All that run in its root file system."""
        main = self.main
        if main is None:
            return []
        found = [main]
        with contextlib.suppress(psutil.NoSuchProcess, OSError):
            ours = Path(f"/proc/{main.pid}/ns/mnt").readlink()
            for process in psutil.process_iter():
                with contextlib.suppress(psutil.NoSuchProcess, OSError):
                    if process.pid != main.pid and Path(f"/proc/{process.pid}/ns/mnt").readlink() == ours:
                        found.append(process)
        return found

    def kill(self) -> None:
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        _end(self._outer)


def _write_image(folder: Path) -> None:
    """What the image has at /opt/tailpack, and those files of /etc that are not this machine's."""
    binaries = folder / "bin"
    binaries.mkdir(parents=True)
    python = shlex.quote(sys.executable)
    for name, command in (
        ("tailpack", f"{python} -m protos.cli"),
        ("ray", shlex.quote(str(Path(sys.executable).parent / "ray"))),
        ("python", python),
    ):
        (binaries / name).write_text(f'#!/bin/sh\nexec {command} "$@"\n')
        (binaries / name).chmod(0o755)
    (folder / "passwd").write_text("root:x:0:0::/root:/bin/sh\ntailpack:x:10001:10001::/tmp:/usr/sbin/nologin\n")
    (folder / "group").write_text("root:x:0:\ntailpack:x:10001:\n")
    (folder / "nsswitch.conf").write_text("passwd: files\ngroup: files\nhosts: files\n")
    (folder / "host.conf").write_text("multi on\n")  # all lines of a name are its addresses


def _setup(network: Network, spec: ContainerSpec, root: Path) -> str:
    """The script that makes a container's root file system and becomes its command."""
    r = shlex.quote(str(root))
    lines = ["set -e", "mount --make-rprivate /", f"mount -t tmpfs -o mode=0755 root {r}", f"cd {r}"]
    lines += ["mkdir -p proc sys dev etc run tmp opt/tailpack/bin"]
    for name in ("usr", "bin", "sbin", "lib", "lib64"):
        path = Path("/") / name
        if path.is_symlink():
            lines.append(f"ln -s {shlex.quote(str(path.readlink()))} {name}")
        elif path.exists():
            lines.append(f"mkdir {name}; mount --bind -o ro /{name} {name}")
    lines += ["mount -t proc proc proc", "mount --rbind /sys sys", "mount -t tmpfs -o mode=0755 dev dev"]
    lines += [f"touch dev/{d}; mount --bind /dev/{d} dev/{d}" for d in ("null", "zero", "full", "random", "urandom")]
    lines += ["ln -s /proc/self/fd dev/fd", "mkdir dev/shm"]
    for name in ("passwd", "group", "nsswitch.conf", "host.conf"):
        lines.append(f"cp {shlex.quote(str(network.image / name))} etc/{name}")
    lines += ["cp /etc/ld.so.cache etc/ 2>/dev/null || true", "mkdir -p etc/ssl", "mount --bind -o ro /etc/ssl etc/ssl"]
    lines += [f"touch etc/hosts; mount --bind -o ro {shlex.quote(str(network.hosts))} etc/hosts"]
    lines += [f"mount --bind -o ro {shlex.quote(str(network.image / 'bin'))} opt/tailpack/bin"]
    for mount in sorted(spec.mounts, key=lambda each: each.path):
        at = shlex.quote(mount.path.lstrip("/"))
        flags = "-o ro " if mount.read_only else ""
        lines.append(f"mkdir -p {at}; mount --bind {flags}{shlex.quote(str(mount.source))} {at}")
    for ours in (sys.base_prefix, sys.prefix, str(ROOT)):  # behind the volumes: they may lie under /tmp
        at = shlex.quote(ours.lstrip("/"))
        lines.append(f"mkdir -p {at}; mount --bind -o ro {shlex.quote(ours)} {at}")
    lines.append("mount -o remount,ro .")
    identity = f"--reuid={spec.user} --regid={spec.group} --clear-groups --bounding-set=-all --no-new-privs"
    environment = " ".join(shlex.quote(f"{name}={value}") for name, value in spec.env.items())
    command = " ".join(map(shlex.quote, spec.command))
    start = f'cd /tmp 2>/dev/null || cd /; exec setpriv {identity} env -i {environment} "$@"'
    lines.append(f"exec chroot . sh -c {shlex.quote(start)} sh {command}")
    return "\n".join(lines) + "\n"


def _setns(descriptor: int) -> None:
    if _libc.setns(descriptor, _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns")


def _inner(process: subprocess.Popen[bytes] | None) -> int | None:
    """The process that `unshare --fork` started."""
    if process is None or process.poll() is not None:
        return None
    with contextlib.suppress(psutil.NoSuchProcess):
        children = psutil.Process(process.pid).children()
        return children[0].pid if children else None
    return None


def _entry(line: str) -> tuple[tuple[str, int], tuple[str, int], int]:
    """(local, remote, state) of a line of /proc/net/tcp or tcp6."""
    _, local, remote, state, *_ = line.split()
    return _address(local), _address(remote), int(state, 16)


def _address(text: str) -> tuple[str, int]:
    ip, port = text.split(":")
    return socket.inet_ntoa(bytes.fromhex(ip[-8:])[::-1]), int(port, 16)  # IPv4, also where it is mapped into IPv6


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(process.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.send_signal(signal.SIGKILL)
        process.kill()
    process.wait(20)

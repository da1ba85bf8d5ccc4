"""The chart, executed: every container of the rendered pods as it is, in namespaces of its own, without Kubernetes.

One cluster of pods for all tests here, brought up over TLS with tokens and Ray's token; then probed, called, upgraded
and drained, in this order. What it stands on is in tests/e2e/pods.py and chart_pods.py.

There are two worker pods; TAILPACK_CHART_WORKERS=1 leaves out what needs both.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from router.auth import file_lines, new_token
from tests.certificates import Authority
from tests.chart import NAMESPACE, RELEASE, render
from tests.e2e import pods
from tests.e2e.chart_pods import COMPONENT, ChartCluster, allowed
from tests.e2e.cluster import write_tiny_model
from tests.e2e.pods import Container, ContainerSpec, Mount, Network, Pod, wait_for

WORKER_PODS = int(os.environ.get("TAILPACK_CHART_WORKERS", "2"))
LONGEST_STREAM_S = 30
FULL = f"{RELEASE}-tailpack"
STREAMS, MAX_TOKENS = 3, 300
VALUES = f"""
model: {{source: image, path: /models/tiny, name: tiny}}
longestStreamSeconds: {LONGEST_STREAM_S}
routers: {{replicas: 2, preStopSeconds: 1}}
workerGroups:
  - name: cpu
    replicas: {WORKER_PODS}
    cpuWorkers: 1
    kvMiB: 64
    maxRunning: 8
    deterministic: true
    extraArgs: [--threads=1]
tls: {{mode: secrets, secrets: {{router: router-tls, worker: worker-tls, client: client-tls}}}}
tokens: {{secretName: tokens, clientSecret: token}}
loadTest: {{enabled: true, concurrency: 2, seconds: 2, promptTokens: "16", maxTokens: "8"}}
"""

pytestmark = [
    pytest.mark.skipif(
        not os.environ.get("TAILPACK_CHART"), reason="two nodes of Ray take a minute: `make chart` runs it"
    ),
    pytest.mark.skipif(bool(pods.missing()), reason=f"pods cannot be made here: {pods.missing()}"),
    pytest.mark.timeout(600),
]


class Deployment:
    """The release, running."""

    def __init__(self, cluster: ChartCluster, token: str) -> None:
        self.cluster = cluster
        self.token = token
        self.head = cluster.create("head-0", "head")
        self.routers = [cluster.create(f"router-{i}", "router") for i in range(2)]
        self.workers = [cluster.create(f"worker-{i}", "worker", "cpu") for i in range(WORKER_PODS)]
        cluster.await_ready(self.head, *self.workers, *self.routers)

    def caller(self, name: str, *, streams: int = STREAMS, max_tokens: int = MAX_TOKENS, turns: int = 0) -> Caller:
        return Caller(self, name, streams, max_tokens, turns)


class Caller:
    """A pod of this release's clients that streams answers through the routers' headless Service.

    Each of so many streams asks for ``turns`` answers, one after another; 0: until ``finish``.
    """

    def __init__(self, deployment: Deployment, name: str, streams: int, max_tokens: int, turns: int) -> None:
        cluster = deployment.cluster
        self.streams, self.max_tokens = streams, max_tokens
        self.folder = cluster.network.folder / "volumes" / name
        tls = self.folder / "tls"
        tls.mkdir(parents=True)
        (tls / "ca.crt").write_bytes(cluster.secrets["client-tls"]["ca.crt"])
        self.folder.chmod(0o777)
        template = cluster.template("client")
        self.pod = Pod(cluster.network, name, template["metadata"]["labels"], False)
        self.pod.start()
        # The certificate's name is the Service's; its address is every router's.
        address = f"{FULL}-headless.{NAMESPACE}.svc:7700"
        command = ["python", "-m", "tests.e2e.chart_client", address, "/tmp/tls/ca.crt", "/tmp/stop"]
        env = {
            **deployment.routers[0].containers["router"].spec.env,
            "TAILPACK_TOKEN": deployment.token,
            "GRPC_DNS_RESOLVER": "native",
        }
        spec = ContainerSpec(
            "caller", (*command, str(streams), str(max_tokens), str(turns)), env, (Mount(self.folder, "/tmp"),)
        )
        self.container: Container = self.pod.run(spec)

    def events(self, kind: str) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in self.container.log.splitlines() if line.startswith("{")]
        return [line for line in lines if line["event"] == kind]

    def await_events(self, kind: str, count: int, timeout_s: float = 60.0) -> None:
        def there() -> bool:
            assert self.container.status is None, self.container.log
            return len(self.events(kind)) >= count

        wait_for(f"{count} times {kind!r}", there, timeout_s)

    def finish(self) -> list[dict[str, Any]]:
        """Lets running answers end. Returns what has ended; nothing may have failed, nothing may differ."""
        (self.folder / "stop").touch()
        assert self.container.wait(120) == 0, self.container.log
        assert self.events("failed") == [] and self.events("stopped")
        ended = self.events("ended")
        for answer in ended:
            assert answer["tokens"] == answer["usage"] == self.max_tokens, answer
        for number in range(self.streams):  # deterministic workers: the same prompt, the same text, whatever happened
            assert len({answer["text"] for answer in ended if answer["number"] == number}) == 1
        return ended


def certificates(folder: Path) -> Mapping[str, Mapping[str, bytes]]:
    authority = Authority(folder)

    def secret(name: str, host: str) -> dict[str, bytes]:
        issued = authority.issue(name, host=host)
        files = {"tls.crt": issued.cert, "tls.key": issued.key, "ca.crt": authority.cert}
        return {key: path.read_bytes() for key, path in files.items()}

    return {
        "router-tls": secret("router", f"*.{NAMESPACE}.svc"),
        "worker-tls": secret("worker", f"{FULL}-workers"),
        "client-tls": secret("client", "client"),
    }


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    folder = tmp_path_factory.mktemp("chart")
    for part in (folder, *folder.parents[:2]):  # pods run as another user
        part.chmod(part.stat().st_mode | 0o011)
    models, issued, net = folder / "models", folder / "issued", folder / "net"
    for each in (models, issued, net):
        each.mkdir()
    write_tiny_model(models / "tiny")
    subprocess.run(["chmod", "-R", "a+rX", str(models)], check=True)
    token = new_token()
    secrets = {
        **certificates(issued),
        "tokens": {"tokens.toml": file_lines("tenant-a", token).encode()},
        "token": {"token": token.encode()},
        FULL: {"auth_token": os.urandom(24).hex().encode()},
    }
    with Network(net) as network, ChartCluster(network, render(VALUES), secrets, models) as cluster:
        try:
            yield Deployment(cluster, token)
        except BaseException:
            for pod in network.pods:
                for container in pod.containers.values():
                    print(f"== {pod.name}/{container.spec.name} ({container.status})\n{container.log[-2500:]}")
            raise


def test_every_probe_passes_and_nothing_had_to_be_restarted(deployment: Deployment) -> None:
    cluster = deployment.cluster
    made = 0
    for pod in (deployment.head, *deployment.routers, *deployment.workers):
        for name in pod.containers:
            for which in ("startupProbe", "readinessProbe", "livenessProbe"):
                assert cluster.probe(pod, name, which), (pod.name, name, which)
                made += 1
    assert made == 3 * (1 + 2 + 3 * WORKER_PODS)
    ours = [name for name in cluster.restarts if "/ray-" not in name]  # Ray gives up where a machine is slow
    assert ours == [], cluster.restarts


def test_containers_are_what_their_security_context_says(deployment: Deployment) -> None:
    for pod in (deployment.routers[0], deployment.workers[0]):
        for name, container in pod.containers.items():
            done = container.exec(
                ["sh", "-c", "id -u; grep -E 'CapEff|NoNewPrivs' /proc/self/status; touch /x; touch /usr/x"]
            )
            assert done.stdout.splitlines()[0] == "10001", name
            assert "CapEff:\t0000000000000000" in done.stdout, name
            assert done.stderr.count("Read-only file system") + done.stderr.count("Permission denied") == 2, done.stderr
            main = container.main
            assert main is not None and main.uids().real == 10001


def test_helm_test_generates_tokens_over_tls(deployment: Deployment) -> None:
    pod = deployment.cluster.create("helm-test", "client")
    generate = pod.containers["generate"]
    assert generate.wait(60) == 0, generate.log
    assert "tokens" in generate.log  # --stats


def test_the_load_test_measures_over_tls(deployment: Deployment) -> None:
    pod = deployment.cluster.create("load-test", "load")
    bench = pod.containers["bench"]
    assert bench.wait(90) == 0, bench.log
    assert "tokens/s" in bench.log


def test_who_has_no_token_or_no_certificate_is_not_let_in(deployment: Deployment) -> None:
    router = deployment.routers[0].containers["router"]
    address = f"{FULL}.{NAMESPACE}.svc:7700"
    ask = ["tailpack", "status", f"--router={address}"]
    assert "TOKEN_MISSING" in router.exec([*ask, "--tls-ca=/etc/tailpack/tls/ca.crt"]).stderr
    assert router.exec(ask).returncode == 1
    worker = f"{deployment.workers[0].ip}:7730"  # workers demand a router's certificate
    asked = router.exec(
        [
            "tailpack",
            "memory",
            f"--worker={worker}",
            "--tls-ca=/etc/tailpack/tls/ca.crt",
            f"--tls-server-name={FULL}-workers",
        ]
    )
    assert asked.returncode == 1, asked.stdout


def examined(container: Container, token: str, *arguments: str) -> set[str]:
    """`tailpack doctor` in a container: what it looked at; nothing is wrong."""
    files = {"ca": "ca.crt", "cert": "tls.crt", "key": "tls.key", "client-cert": "tls.crt", "client-key": "tls.key"}
    tls = [f"--tls-{what}=/etc/tailpack/tls/{file}" for what, file in files.items()]
    name = f"--worker-server-name={FULL}-workers"
    done = container.exec(["env", f"TAILPACK_TOKEN={token}", "tailpack", "doctor", *tls, name, *arguments, "--json"])
    findings = json.loads(done.stdout)["findings"]
    assert done.returncode == 0, done.stdout
    assert [each for each in findings if each["status"] in ("FAIL", "warn", "unknown")] == []
    return {each["check"] for each in findings}


def test_the_doctor_finds_nothing_wrong_in_either_kind_of_pod(deployment: Deployment) -> None:
    cluster = deployment.cluster
    workers = ["--worker=127.0.0.1:7730"]  # they may not call routers
    seen = examined(deployment.workers[0].containers["kvstore"], deployment.token, *workers)
    assert seen >= {"workers", "workers agree", "worker's certificate", "certificate files", "versions"}
    assert seen >= {"kvstore sockets", "kvstore", "integrity", "arenas", "memory limit", "GPUs", "/dev/shm"}
    (command,) = (each["command"] for each in cluster.template("router")["spec"]["containers"])
    behind = next(word for word in command if word.startswith("--worker-dns=")).removeprefix("--worker-dns=")
    own = ["--router=127.0.0.1:7700", f"--tls-server-name={FULL}.{NAMESPACE}.svc"]
    own += [f"--resolve={behind.rpartition(':')[0]}", "--tokens=/etc/tailpack/tokens/tokens.toml"]
    seen = examined(deployment.routers[0].containers["router"], deployment.token, *own)
    assert seen >= {
        "dns",
        "router",
        "router's certificate",
        "workers",
        "workers agree",
        "worker's certificate",
        "tokens",
    }


def test_routers_are_replaced_one_by_one_and_no_answer_is_lost(deployment: Deployment) -> None:
    cluster = deployment.cluster
    caller = deployment.caller("caller-routers")
    caller.await_events("began", STREAMS)
    for index, old in enumerate(list(deployment.routers)):
        new = cluster.create(f"router-{index + 2}", "router")  # maxSurge 1, maxUnavailable 0
        cluster.await_ready(new)
        began = len(caller.events("began"))
        statuses = cluster.delete(old.name)
        assert statuses == {"router": 0}, old.containers["router"].log[-3000:]
        deployment.routers[index] = new
        caller.await_events("began", began + 1)  # it goes on through those that are left
    assert len(caller.finish()) >= STREAMS


@pytest.mark.skipif(WORKER_PODS < 2, reason="needs two worker pods: TAILPACK_CHART_WORKERS=2")
def test_worker_pods_are_replaced_one_by_one_and_no_answer_is_lost(deployment: Deployment) -> None:
    cluster = deployment.cluster
    caller = deployment.caller("caller-workers")
    caller.await_events("began", STREAMS)
    for index, old in enumerate(list(deployment.workers)):
        statuses = cluster.delete(old.name)
        assert statuses["workers"] == statuses["kvstore"] == 0, statuses
        new = cluster.create(f"worker-{index + WORKER_PODS}", "worker", "cpu")  # KubeRay makes another
        cluster.await_ready(new)
        deployment.workers[index] = new
        ended = len(caller.events("ended"))
        caller.await_events("ended", ended + 2 * STREAMS)
    caller.finish()


KILL_WORKER = """
import os, pathlib, signal
ours = [each for each in pathlib.Path("/proc").glob("[0-9]*") if os.access(each / "environ", os.R_OK)]
holders = [each for each in ours if "-control" in (each / "maps").read_text()]
(worker,) = (each for each in holders if b"kvstore" not in (each / "cmdline").read_bytes())
signal.pidfd_send_signal(os.pidfd_open(int(worker.name)), signal.SIGKILL)
"""


def cached_of(deployment: Deployment, prompt: str) -> tuple[int, str]:
    """(tokens of the prompt that came from the KV cache, the answer), asked at a router's own door."""
    ask = ["env", f"TAILPACK_TOKEN={deployment.token}", "tailpack", "generate", "--router=127.0.0.1:7700"]
    ask += ["--tls-ca=/etc/tailpack/tls/ca.crt", f"--tls-server-name={FULL}.{NAMESPACE}.svc"]
    ask += ["--raw", "--json", "--max-tokens=8", "--ignore-eos", "--retries=20", "--prefix-reuse=exact", prompt]
    done = deployment.routers[0].containers["router"].exec(ask, timeout_s=120)
    assert done.returncode == 0, done.stderr
    chunks = [json.loads(line) for line in done.stdout.splitlines()]
    return int(chunks[-1]["usage"]["cached_prompt_tokens"]), "".join(chunk["text"] for chunk in chunks)


def test_the_cache_outlives_the_worker_and_ray_but_not_the_pod(deployment: Deployment) -> None:
    """The kvstore is a container of its own, and may end workers: one process namespace, one user."""
    cluster = deployment.cluster
    for spare in deployment.workers[1:]:
        cluster.delete(spare.name)
    pod = deployment.workers[0]
    del deployment.workers[1:]
    prompt = "What a pod keeps when its worker ends. " * 12
    first, answer = cached_of(deployment, prompt)
    assert first == 0
    assert cached_of(deployment, prompt)[0] >= 128  # whole pages
    store = pod.containers["kvstore"].main

    killed = pod.containers["kvstore"].exec(["python", "-c", KILL_WORKER])
    assert killed.returncode == 0, killed.stderr
    wait_for("the worker's end is seen", lambda: not cluster.ready(pod), 30, 0.1)
    cluster.await_ready(pod, *deployment.routers)
    cached, again = cached_of(deployment, prompt)
    assert cached >= 128 and again == answer

    ray = pod.containers["ray-worker"].main
    assert ray is not None
    ray.kill()
    wait_for("Ray's end is seen", lambda: not cluster.ready(pod), 60, 0.1)
    cluster.await_ready(pod, *deployment.routers)
    cached, again = cached_of(deployment, prompt)
    assert cached >= 128 and again == answer
    assert cluster.restarts[f"{pod.name}/ray-worker"] and not cluster.restarts[f"{pod.name}/kvstore"]
    assert pod.containers["kvstore"].main == store

    new = cluster.create("worker-new", "worker", "cpu")  # what replaces a pod begins without a cache
    cluster.await_ready(new)
    cluster.delete(pod.name)
    deployment.workers[:] = [new]
    cluster.await_ready(*deployment.routers)
    assert cached_of(deployment, prompt) == (0, answer)


@pytest.mark.parametrize("order", [("ray-worker", "workers"), ("workers", "ray-worker"), ("kvstore",)])
def test_new_images_in_place_lose_no_answer_and_keep_the_cache(deployment: Deployment, order: tuple[str, ...]) -> None:
    """Kubelet says nothing of the order in which it ends a running pod's containers for their new images."""
    cluster = deployment.cluster
    pod = deployment.workers[0]
    prompt = f"What is kept when {' and then '.join(order)} is replaced. " * 10
    first, answer = cached_of(deployment, prompt)
    caller = deployment.caller(f"caller-in-place-{order[0]}", streams=4, max_tokens=600)
    caller.await_events("began", 4)
    cluster.replace(pod.name, *order)
    if order != ("kvstore",):
        lines = [json.loads(line) for line in pod.containers["kvstore"].log.splitlines() if '"detached"' in line]
        assert lines[-1]["sequences_kept"] == 0, lines  # else Ray has ended beneath the workers
    cluster.await_ready(pod, *deployment.routers)
    ended = len(caller.events("ended"))
    caller.await_events("ended", ended + 4)  # they go on
    caller.finish()
    cached, again = cached_of(deployment, prompt)
    assert first == 0 and cached >= 128 and again == answer


def test_a_lost_head_ends_workers_when_the_next_one_comes_and_they_come_back(deployment: Deployment) -> None:
    """Without Redis. Until then they serve without a head."""
    cluster = deployment.cluster
    pod = deployment.workers[0]
    prompt = "What goes on while there is no head. " * 12
    first, answer = cached_of(deployment, prompt)
    cluster.delete(deployment.head.name, grace_s=30)
    assert first == 0 and cached_of(deployment, prompt)[1] == answer
    deployment.head = cluster.create("head-1", "head")
    ended = cluster.restarts[f"{pod.name}/ray-worker"]
    wait_for("Ray's end", lambda: cluster.restarts[f"{pod.name}/ray-worker"] > ended, 120, 0.2)
    wait_for("its end is seen", lambda: not cluster.ready(pod), 30, 0.1)
    cluster.await_ready(deployment.head, pod, *deployment.routers)
    cached, again = cached_of(deployment, prompt)
    assert cached >= 128 and again == answer


def test_a_worker_pod_drains_within_its_grace_and_live_answers_end(deployment: Deployment) -> None:
    """The last worker pod is told to stop while answers run: those that run end whole, where they are."""
    cluster = deployment.cluster
    caller = deployment.caller("caller-drain", streams=8, max_tokens=900, turns=1)
    caller.await_events("began", 8)
    began = time.monotonic()
    assert len(caller.events("ended")) < 8  # some are live when the pod is told
    statuses = cluster.delete(deployment.workers[0].name)
    assert statuses["workers"] == statuses["kvstore"] == 0, statuses
    assert time.monotonic() - began < LONGEST_STREAM_S + 60  # the chart's grace; else it was killed
    assert len(caller.finish()) == 8


def test_connections_stay_inside_the_network_policies(deployment: Deployment) -> None:
    """Behind all of the above: of every pod that lived."""
    cluster = deployment.cluster
    kinds = {pod.name: pod.labels[COMPONENT] for pod in cluster.network.pods}
    seen = {(kinds[one], kinds[other], port) for one, other, port in cluster.connections()}
    assert {("client", "router", 7700), ("router", "worker", 7730), ("worker", "head", 6379)} <= seen
    assert cluster.forbidden() == set()


def test_the_policies_say_no(deployment: Deployment) -> None:
    """What is judged by them would be found: who may not call whom."""
    policies = deployment.cluster.of_kind("NetworkPolicy")
    cluster = deployment.cluster
    templates = {each: cluster.template(each, "cpu") for each in ("client", "router", "worker", "head")}
    labels = {name: template["metadata"]["labels"] for name, template in templates.items()}
    stranger = {"app": "stranger"}
    for source, target, port in (
        (labels["client"], labels["worker"], 7730),
        (labels["router"], labels["worker"], 7721),
        (labels["router"], labels["head"], 6379),
        (labels["worker"], labels["router"], 7700),
        (stranger, labels["worker"], 7730),
        (stranger, labels["head"], 6379),
        (stranger, labels["router"], 7702),
    ):
        assert not allowed(policies, source, target, port), (source, target, port)
    assert allowed(policies, stranger, labels["router"], 7700)  # every pod of the namespace may call

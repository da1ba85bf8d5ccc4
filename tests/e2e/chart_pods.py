"""A chart's rendered objects as pods of ``tests.e2e.pods``: what kubelet, KubeRay and the Services do with them.

KubeRay's part is written down here, from its documentation: the first container of each Ray pod gets its command from
rayStartParams, Ray's address and token by environment, and waits for the head with `ray health-check`.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.e2e.pods import GATEWAY, ROOT, Container, ContainerSpec, Mount, Network, Pod, wait_for
from tests.unit.test_image import lineage, stages

Object = dict[str, Any]
COMPONENT = "app.kubernetes.io/component"
GCS_PORT = 6379
NOT_FLAGS = ("include-dashboard", "log-color")
METADATA = ("169.254.169.254", 80)
"""Ray asks there what cloud it is in. The policies rightly say no, and Ray goes on."""


class ChartCluster:
    """Pods of one release. ``objects``: as helm rendered them. ``secrets``: name -> key -> content.

    ``models``: folder that images hold at ``/models``.
    """

    def __init__(
        self, network: Network, objects: Sequence[Object], secrets: Mapping[str, Mapping[str, bytes]], models: Path
    ) -> None:
        self.network = network
        self.objects = list(objects)
        self.secrets = dict(secrets)
        self.models = models
        self.pods: dict[str, Pod] = {}
        self._templates: dict[str, Object] = {}
        self.restarts: Counter[str] = Counter()
        """Of containers that ended by themselves, by pod/container."""
        self._syncing: set[str] = set()
        """Pods with which ``replace`` is busy: kubelet does one thing with a pod at a time."""
        self._ending = threading.Event()
        self._kubelet = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> ChartCluster:
        self._kubelet.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        self._kubelet.join()

    # --- what there is to run ---

    def of_kind(self, kind: str) -> list[Object]:
        return [each for each in self.objects if each["kind"] == kind]

    @property
    def ray(self) -> Object:
        (found,) = self.of_kind("RayCluster")
        return found

    def template(self, component: str, group: str = "") -> Object:
        """The pod template of a component: router, head, worker (of a group), client and load (of `helm test`)."""
        if component == "router":
            return dict(self.of_kind("Deployment")[0]["spec"]["template"])
        if component == "client":
            (pod,) = (each for each in self.of_kind("Pod") if each["metadata"]["labels"][COMPONENT] == "client")
            return dict(pod)
        if component == "load":
            (job,) = self.of_kind("Job")
            return dict(job["spec"]["template"])
        if component == "head":
            return dict(self.ray["spec"]["headGroupSpec"]["template"])
        (found,) = (each for each in self.ray["spec"]["workerGroupSpecs"] if each["groupName"] == group)
        return dict(found["template"])

    # --- a pod's life ---

    def create(self, name: str, component: str, group: str = "") -> Pod:
        """Starts a pod: init containers that stay first, each until its startup probe passes, then the others."""
        template = self.template(component, group)
        spec = template["spec"]
        pod = Pod(self.network, name, template["metadata"]["labels"], bool(spec.get("shareProcessNamespace")))
        pod.start()
        self._templates[name], self.pods[name] = template, pod
        if component == "head":
            self._name_head(pod)
        folder = self.network.folder / "volumes" / name
        volumes = {volume["name"]: self._volume(volume, folder / volume["name"], spec) for volume in spec["volumes"]}
        for init in spec.get("initContainers", []):
            assert init["restartPolicy"] == "Always", "only sidecars are known here"
            pod.run(self._resolved(init, pod, volumes, spec))
            self.await_probe(pod, init["name"], "startupProbe")
        ray_params = self._ray_params(component, group)
        for index, container in enumerate(spec["containers"]):
            made_by_kuberay = self._kuberay(component, ray_params) if index == 0 and ray_params is not None else None
            if component == "worker" and made_by_kuberay is not None:
                self._wait_gcs_ready(pod, self._resolved(container, pod, volumes, spec, made_by_kuberay))
            pod.run(self._resolved(container, pod, volumes, spec, made_by_kuberay))
        self.publish()
        return pod

    def _wait_gcs_ready(self, pod: Pod, ray: ContainerSpec) -> None:
        """KubeRay's init container of this name, with Ray's image, mounts and environment; the kvstore's mounts are the
        same.
        """
        environment = [f"{name}={value}" for name, value in ray.env.items()]
        asked = ["env", *environment, "ray", "health-check", "--address", f"{self._head_name()}:{GCS_PORT}"]
        wait_for("Ray's head", lambda: pod.containers["kvstore"].exec(asked).returncode == 0)

    def delete(self, name: str, *, grace_s: float | None = None) -> dict[str, int | None]:
        """Ends a pod as kubelet does: hooks, SIGTERM, then its sidecars; SIGKILL to what is left after its grace.

        Returns:
            The exit status of each container; -9 where it had to be killed.
        """
        pod, spec = self.pods.pop(name), self._templates.pop(name)["spec"]
        self.publish()
        deadline = time.monotonic() + (spec["terminationGracePeriodSeconds"] if grace_s is None else grace_s)
        ends = [
            threading.Thread(target=self._end, args=(pod.containers[each["name"]], each, deadline))
            for each in spec["containers"]
        ]
        for end in ends:
            end.start()
        for end in ends:
            end.join()
        for sidecar in reversed(spec.get("initContainers", [])):
            self._end(pod.containers[sidecar["name"]], sidecar, deadline)
        statuses = {each.spec.name: each.status for each in pod.containers.values()}
        pod.look()
        pod.kill()
        return statuses

    def replace(self, name: str, *containers: str) -> None:
        """What kubelet does when images of a running pod's containers change: ends them one after the other, hooks
        first, each with the pod's grace, and then starts them again.
        """
        pod, spec = self.pods[name], self._templates[name]["spec"]
        told = {each["name"]: each for each in (*spec["containers"], *spec.get("initContainers", []))}
        old = [pod.containers[each] for each in containers]
        self._syncing.add(name)
        for container in old:
            deadline = time.monotonic() + spec["terminationGracePeriodSeconds"]
            self._end(container, told[container.spec.name], deadline)
        for container in old:
            pod.run(container.spec)
        self._syncing.remove(name)

    def _end(self, container: Container, told: Object, deadline: float) -> None:
        hook = told.get("lifecycle", {}).get("preStop", {})
        left = max(0.1, deadline - time.monotonic())
        if "sleep" in hook:
            time.sleep(min(left, hook["sleep"]["seconds"]))
        elif "exec" in hook and container.main is not None:
            done = container.exec(hook["exec"]["command"], timeout_s=left)
            assert done.returncode == 0, (container.spec.name, done.stderr)
        container.signal(signal.SIGTERM)
        try:
            container.wait(max(0.1, deadline - time.monotonic()))
        except Exception:  # noqa: BLE001 - whatever it is, kubelet kills
            container.kill()
        container.kill()  # what its main process left behind goes with it

    def _watch(self) -> None:
        """Starts containers again that ended by themselves (restartPolicy Always), and looks at connections."""
        while not self._ending.wait(0.1):
            for pod in [pod for pod in self.network.pods if pod.running]:
                with contextlib.suppress(AssertionError, OSError):
                    pod.look()
            for name, pod in list(self.pods.items()):
                policy = self._templates[name]["spec"].get("restartPolicy", "Always")
                for container in list(pod.containers.values()):
                    settled = name in self.pods and name not in self._syncing
                    if policy == "Always" and container.status is not None and settled:
                        container.kill()
                        self.restarts[f"{name}/{container.spec.name}"] += 1
                        pod.run(container.spec)

    # --- services ---

    def publish(self) -> None:
        """Endpoints of every Service: pods that are ready, or all of them where the Service says so."""
        for service in self.of_kind("Service"):
            spec, meta = service["spec"], service["metadata"]
            pods = [pod for pod in self.pods.values() if spec["selector"].items() <= pod.labels.items()]
            if not spec.get("publishNotReadyAddresses"):
                pods = [pod for pod in pods if self.ready(pod)]
            name = f"{meta['name']}.{meta['namespace']}"
            for each in (meta["name"], name, f"{name}.svc", f"{name}.svc.cluster.local"):
                self.network.name(each, [pod.ip for pod in pods])

    def _name_head(self, pod: Pod) -> None:
        self.network.name(self._head_name(), [pod.ip])

    def _head_name(self) -> str:
        meta = self.ray["metadata"]
        return f"{meta['name']}-head-svc.{meta['namespace']}.svc.cluster.local"

    # --- probes ---

    def ready(self, pod: Pod) -> bool:
        """Whether every container's readiness probe passes now."""
        spec = self._templates[pod.name]["spec"]
        told = [*spec.get("initContainers", []), *spec["containers"]]
        return all(self.probe(pod, each["name"], "readinessProbe") for each in told)

    def await_ready(self, *pods: Pod, timeout_s: float = 240.0) -> None:
        for pod in pods:
            wait_for(f"{pod.name} is ready", lambda pod=pod: self.ready(pod), timeout_s, 0.2)
        self.publish()

    def await_probe(self, pod: Pod, name: str, which: str, timeout_s: float = 60.0) -> None:
        wait_for(f"{which} of {name}", lambda: self.probe(pod, name, which), timeout_s)

    def probe(self, pod: Pod, name: str, which: str) -> bool:
        """Makes one probe once, as kubelet does: from the node."""
        spec = self._templates[pod.name]["spec"]
        told = next(each for each in [*spec.get("initContainers", []), *spec["containers"]] if each["name"] == name)
        probe = told[which]
        timeout_s = float(probe.get("timeoutSeconds", 1))
        if "exec" in probe:
            done = pod.containers[name].exec(probe["exec"]["command"], timeout_s=timeout_s)
            return done.returncode == 0
        if "tcpSocket" in probe:
            return self._connects(pod.ip, _port(told, probe["tcpSocket"]["port"]), timeout_s)
        get = probe["httpGet"]
        assert get.get("scheme", "HTTP") == "HTTP"
        with contextlib.suppress(OSError, http.client.HTTPException):
            connection = http.client.HTTPConnection(pod.ip, timeout=timeout_s)
            connection.sock = self.network.connect(pod.ip, _port(told, get["port"]), timeout_s)
            with contextlib.closing(connection):
                connection.request("GET", get["path"])
                return 200 <= connection.getresponse().status < 400
        return False

    def _connects(self, ip: str, port: int, timeout_s: float = 1.0) -> bool:
        with contextlib.suppress(OSError):
            self.network.connect(ip, port, timeout_s).close()
            return True
        return False

    # --- what kubelet and KubeRay make of a container ---

    def _volume(self, volume: Object, folder: Path, spec: Object) -> Path:
        group = int(spec["securityContext"]["fsGroup"])
        folder.mkdir(parents=True)
        if "secret" in volume:
            for key, content in self.secrets[volume["secret"]["secretName"]].items():
                file = folder / key
                file.write_bytes(content)
                file.chmod(int(volume["secret"].get("defaultMode", 0o644)))
                os.chown(file, 0, group)
            folder.chmod(0o755)
        else:
            assert "emptyDir" in volume, volume
            os.chown(folder, 0, group)
            folder.chmod(0o2777)
        return folder

    def _resolved(
        self,
        told: Object,
        pod: Pod,
        volumes: Mapping[str, Path],
        spec: Object,
        made_by_kuberay: tuple[list[str], dict[str, str]] | None = None,
    ) -> ContainerSpec:
        env = {**image_env(), **{each["name"]: self._env(each, pod) for each in told.get("env", [])}}
        command = [*told.get("command", []), *told.get("args", [])]
        if made_by_kuberay is not None:
            assert not command, "KubeRay would keep this command"
            command, more = made_by_kuberay
            env = {**more, **env}
        command = [re.sub(r"\$\((\w+)\)", lambda match: env[match[1]], word) for word in command]
        mounts = [
            Mount(volumes[each["name"]], each["mountPath"], bool(each.get("readOnly")))
            for each in told.get("volumeMounts", [])
        ]
        security = spec["securityContext"]
        own = told["securityContext"]
        assert own["readOnlyRootFilesystem"] and own["capabilities"]["drop"] == ["ALL"]  # what pods.py does to all
        return ContainerSpec(
            name=told["name"],
            command=tuple(command),
            env=env,
            mounts=(Mount(self.models, "/models", True), *mounts),
            user=int(security["runAsUser"]),
            group=int(security["runAsGroup"]),
        )

    def _env(self, told: Object, pod: Pod) -> str:
        if "value" in told:
            return str(told["value"])
        source = told["valueFrom"]
        if "secretKeyRef" in source:
            return self.secrets[source["secretKeyRef"]["name"]][source["secretKeyRef"]["key"]].decode()
        fields = {"metadata.name": pod.name, "status.podIP": pod.ip}
        return fields[source["fieldRef"]["fieldPath"]]

    def _ray_params(self, component: str, group: str) -> dict[str, str] | None:
        if component == "head":
            return dict(self.ray["spec"]["headGroupSpec"]["rayStartParams"])
        if component == "worker":
            groups = {each["groupName"]: each for each in self.ray["spec"]["workerGroupSpecs"]}
            return dict(groups[group]["rayStartParams"])
        return None

    def _kuberay(self, component: str, params: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
        """Command and environment of a Ray container."""
        start = "ray start --head " if component == "head" else "ray start "
        given = dict(params) | ({"port": str(GCS_PORT)} if component == "head" else {})
        if component == "worker":
            given["address"] = f"{self._head_name()}:{GCS_PORT}"
        flags = [
            f"--{key}" if value == "true" and key not in NOT_FLAGS else f"--{key}={value}"
            for key, value in sorted({**given, "block": "true"}.items())
        ]
        meta = self.ray["metadata"]
        address = "127.0.0.1" if component == "head" else self._head_name()
        env = {
            "RAY_CLUSTER_NAME": meta["name"],
            "FQ_RAY_IP": address,
            "RAY_IP": address.split(".")[0] if component == "worker" else address,
            "RAY_PORT": str(GCS_PORT),
            "RAY_ADDRESS": f"{address}:{GCS_PORT}",
            "KUBERAY_GEN_RAY_START_CMD": start + " ".join(flags),
        }
        auth = self.ray["spec"].get("authOptions", {})
        if auth.get("mode") == "token":
            secret = self.secrets[auth.get("secretName", meta["name"])]
            env |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secret["auth_token"].decode()}
        return ["/bin/bash", "-c", "--", f"ulimit -n 65536; {start}{' '.join(flags)}"], env

    # --- who talks to whom ---

    def connections(self) -> set[tuple[str, str, int]]:
        """(pod, pod, port) of every connection seen between pods, those that are gone included; by name."""
        by_ip = {pod.ip: pod for pod in self.network.pods}
        return {
            (pod.name, by_ip[ip].name, port)
            for pod in self.network.pods
            for ip, port in pod.seen
            if ip in by_ip and port in by_ip[ip].listening  # else what came in, seen before its port was
        }

    def forbidden(self) -> set[tuple[str, str, int]]:
        """Those of ``connections`` that the NetworkPolicies would not let through, and those to nobody's pod."""
        pods = {pod.name: pod for pod in self.network.pods}
        policies = self.of_kind("NetworkPolicy")
        outside = {
            (pod.name, ip, port)
            for pod in pods.values()
            for ip, port in pod.seen
            if ip not in {each.ip for each in pods.values()} and ip != GATEWAY and (ip, port) != METADATA
        }
        return outside | {
            (one, other, port)
            for one, other, port in self.connections()
            if not allowed(policies, pods[one].labels, pods[other].labels, port)
        }


def allowed(policies: Sequence[Object], source: Mapping[str, str], target: Mapping[str, str], port: int) -> bool:
    """Whether pods of one namespace may connect: what selects the source lets it out, what selects the target in."""

    def passes(which: str, own: Mapping[str, str], other: Mapping[str, str], rules: str, peers: str) -> bool:
        selecting = [
            each["spec"]
            for each in policies
            if which in each["spec"]["policyTypes"] and selects(each["spec"]["podSelector"], own)
        ]
        return not selecting or any(
            _is_peer(rule.get(peers), other) and _has_port(rule.get("ports"), port)
            for spec in selecting
            for rule in spec.get(rules) or []
        )

    return passes("Egress", source, target, "egress", "to") and passes("Ingress", target, source, "ingress", "from")


def selects(selector: Object, labels: Mapping[str, str]) -> bool:
    assert set(selector) <= {"matchLabels"}, selector
    return bool(selector.get("matchLabels", {}).items() <= labels.items())


def _is_peer(peers: Sequence[Object] | None, labels: Mapping[str, str]) -> bool:
    """Peers of other namespaces and addresses are none of our pods."""
    if not peers:
        return True
    return any(
        "podSelector" in each and "namespaceSelector" not in each and selects(each["podSelector"], labels)
        for each in peers
    )


def _has_port(ports: Sequence[Object] | None, port: int) -> bool:
    tcp = [each for each in ports or () if each.get("protocol", "TCP") == "TCP"]
    return not ports or any(int(each["port"]) <= port <= int(each.get("endPort") or each["port"]) for each in tcp)


def _port(told: Object, port: int | str) -> int:
    if isinstance(port, int):
        return port
    return next(int(each["containerPort"]) for each in told["ports"] if each["name"] == port)


def image_env() -> dict[str, str]:
    """What the image's ENV says; and where this source tree is, which the image has installed."""
    env = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
    for keyword, rest in lineage(stages((ROOT / "Dockerfile").read_text()), "cpu"):
        if keyword == "ENV":
            for name, value in re.findall(r"(\w+)=(\S+)", rest):
                env[name] = value.replace("$PATH", env["PATH"])
    return {**env, "PYTHONPATH": str(ROOT)}

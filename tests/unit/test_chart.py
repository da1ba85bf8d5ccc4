"""The chart's objects, over a matrix of values: they are valid, whole, agree with each other and with our command line,
and nothing is there for what is switched off.
"""

from __future__ import annotations

import importlib.util
import json
import re
from itertools import product
from typing import Any

import click
import jsonschema
import pytest
import yaml

from protos.cli import cli
from tests.chart import (
    CHART,
    EXAMPLES,
    KUBERAY_CRD,
    NAMESPACE,
    RELEASE,
    Object,
    check_kubernetes,
    container,
    containers,
    example,
    helm,
    named,
    of_kind,
    pods,
    promql,
    quantity,
    raycluster_validator,
    render,
)

KUBERNETES = ("1.34", "1.35", "1.36", "1.37")  # the last four minor versions
MODEL = "model: {name: m, pvc: {claimName: models}}\n"

ALL_ON = """
commonLabels: {team: inference}
image: {repository: "registry:5000/a/tailpack", tag: t, pullSecrets: [{name: pull}], gpu: {digest: "sha256:%s"}}
model: {name: m, source: pvc, pvc: {claimName: models, subPath: m}}
longestStreamSeconds: 3600
logs: {prompts: true}
tracing: {otlpEndpoint: "http://otel.monitoring:4317"}
priorityClass: {create: true, name: serving}
serviceAccount: {annotations: {a: b}}
routers:
  autoscaling: {by: cpu}
  extraArgs: [--max-request-bytes=268435456]
  extraEnv: [{name: A, value: "1"}]
  podAnnotations: {a: b}
  nodeSelector: {a: b}
  tolerations: [{operator: Exists}]
  affinity: {nodeAffinity: {}}
  service: {type: LoadBalancer, annotations: {a: b}}
ray:
  auth: {existingSecret: ray-token}
  gcsFaultTolerance:
    {enabled: true, redisAddress: "redis:6379", passwordSecret: {name: redis}, externalStorageNamespace: x}
  head: {nodeSelector: {a: b}, tolerations: [{operator: Exists}], podAnnotations: {a: b}}
workerGroups:
  - {name: big, gpus: 8, replicas: 3, runtimeClassName: nvidia, kvMode: turboquant, kvPreset: tq3, deterministic: true,
     maxSequenceTokens: 32768, standby: true, weightsArena: false,
     decodeGraphs: true, stepTimeBudgetMs: 40, extraArgs: [--prefill-chunk=512],
     extraEnv: [{name: B, valueFrom: {secretKeyRef: {name: s, key: k}}}], podAnnotations: {a: b}, nodeSelector: {a: b}}
  - {name: small, cpuWorkers: 2, kvMiB: 1024}
tls: {mode: secrets, clientCertificates: true, secrets: {router: r-tls, worker: w-tls, client: c-tls}}
tokens: {secretName: tenants, clientSecret: one-token}
networkPolicy:
  clients: [{namespaceSelector: {matchLabels: {a: b}}}]
  monitoring: [{namespaceSelector: {matchLabels: {a: c}}}]
  tracing: [{namespaceSelector: {matchLabels: {a: d}}}]
  redis: [{podSelector: {matchLabels: {a: e}}}]
monitoring:
  serviceMonitors: {enabled: true, labels: {release: prometheus}}
  rules: {enabled: true, labels: {release: prometheus}, requestAgeSeconds: 7200}
  dashboard: {enabled: true}
loadTest: {enabled: true}
""" % ("0" * 64)

ALL_OFF = """
model: {source: image, path: /models/m}
serviceAccount: {create: false}
routers: {http: false, topologySpread: {keys: []}, podDisruptionBudget: {enabled: false}}
ray: {auth: {enabled: false}}
workerDefaults: {podDisruptionBudget: {enabled: false}}
workerGroups: [{name: cpu, replicas: 2}]
networkPolicy: {enabled: false}
"""

ODD = """
model: {name: "a: b #c", pvc: {claimName: "123", subPath: "7"}}
serviceAccount: {create: false, name: "5"}
priorityClass: {name: "6"}
routers: {extraArgs: ["--tls-server-name=a: b #c"], resources: {requests: {cpu: 0.25, memory: 1073741824}}}
ray: {auth: {existingSecret: "44"}}
workerGroups:
  - {name: none, replicas: 0, gpus: 1}
  - {name: mig, gpus: 2, gpuResource: nvidia.com/mig-3g.40gb, kvstore: {cpu: 1.5}, resources: {requests: {cpu: 0.5}},
     tolerations: [{key: nvidia.com/gpu, operator: Exists, effect: NoSchedule}]}
tls: {mode: secrets, secrets: {router: "1", worker: "2", client: "3"}}
tokens: {secretName: "8", clientSecret: "9"}
test: {prompt: "--1: #"}
"""

MONITORED = """
monitoring: {serviceMonitors: {enabled: true}, rules: {enabled: true}}
networkPolicy: {monitoring: [{namespaceSelector: {}}]}
"""

RENAMED = "nameOverride: kv\nfullnameOverride: other\n"

MATRIX = {
    "defaults": MODEL,
    "all on": ALL_ON,
    "all on, renamed": ALL_ON + RENAMED,
    "all off": ALL_OFF,
    "odd": ODD,
    "KEDA": MODEL + "routers: {autoscaling: {by: queuedTokens, prometheusUrl: 'http://p:9090'}}\n",
    **{name: example(name) for name in EXAMPLES},
}
every_case = pytest.mark.parametrize("case", list(MATRIX))


@every_case
def test_helm_3_and_helm_4_make_the_same_objects(case: str) -> None:
    assert render(MATRIX[case], 3) == render(MATRIX[case], 4)


@pytest.mark.parametrize("major", [3, 4])
def test_lint(major: int) -> None:
    done = helm(major, "lint", str(CHART), "--strict", values=ALL_ON)
    assert done.returncode == 0, done.stdout + done.stderr


@every_case
def test_kubernetes_takes_every_object_strictly(case: str) -> None:
    checked = set()
    for version in KUBERNETES:
        for each in render(MATRIX[case]):
            if check_kubernetes(each, version):
                checked.add(each["kind"])
        for name, pod in pods(render(MATRIX[case])).items():  # those inside of a RayCluster, too
            whole = {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {"name": "x", **pod["metadata"]},
                "spec": pod["spec"],
            }
            assert check_kubernetes(whole, version), name
    assert {"Deployment", "Service", "Pod"} <= checked


@every_case
def test_kuberay_takes_the_raycluster_strictly(case: str) -> None:
    (cluster,) = of_kind(render(MATRIX[case]), "RayCluster")
    kuberay().validate(cluster)


def test_what_kuberay_does_not_know_is_noticed() -> None:
    (cluster,) = of_kind(render(MODEL), "RayCluster")
    broken = json.loads(json.dumps(cluster))
    broken["spec"]["workerGroupSpecs"][0]["template"]["spec"]["initContainers"][0]["restartPolice"] = "Always"
    with pytest.raises(jsonschema.ValidationError, match="restartPolice"):
        kuberay().validate(broken)


def kuberay() -> Any:
    validator = raycluster_validator()
    if validator is None:
        pytest.skip(f"KubeRay's CRD is not here: {KUBERAY_CRD}")
    return validator


def test_no_template_is_a_crd() -> None:
    assert not (CHART / "crds").exists() or all("{{" not in f.read_text() for f in (CHART / "crds").rglob("*.yaml"))
    for case in MATRIX.values():
        assert not of_kind(render(case), "CustomResourceDefinition")


# --- values ---


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ("routers: {replica: 2}", "routers.*replica"),
        ("nonsense: true", "nonsense"),
        ("routers: {replicas: 0}", "routers.replicas.*1"),
        ("routers: {replicas: two}", "routers.replicas.*integer"),
        ("workerGroups: []", "workerGroups.*1"),
        ("workerGroups: [{gpus: 1}]", "name"),
        ("workerGroups: [{name: Big}]", "workerGroups.0.name.*pattern"),
        ("workerGroups: [{name: a, gpu: 1}]", "workerGroups.0.*gpu"),
        ("workerGroups: [{name: a, kvMode: int4}]", "workerGroups.0.kvMode.*dense"),
        ("workerGroups: [{name: a, resources: {limits: {memory: 2GB}}}]", "memory.*pattern"),
        ("tls: {mode: yes please}", "tls.mode.*none"),
        ("longestStreamSeconds: 0", "longestStreamSeconds.*1"),
        ("networkPolicy: {clients: [{}]}", "networkPolicy.clients.0"),
        ("image: {gpu: {digest: latest}}", "image.gpu.digest.*pattern"),
        ("model: {name: m}", "model.pvc.claimName: name the PersistentVolumeClaim"),
        ("model: {pvc: {claimName: models}}", "model.name: say what"),
        (MODEL + "tls: {clientCertificates: true}", "tls.clientCertificates is on, but tls.mode is none"),
        (MODEL + "tls: {mode: secrets}", "tls.secrets.*: name the Secret"),
        (MODEL + "tls: {mode: certManager}", "issuerRef.name: name the issuer"),
        (MODEL + "monitoring: {rules: {enabled: true, requestAgeSeconds: 60}}", "above longestStreamSeconds"),
        (MODEL + "routers: {autoscaling: {minReplicas: 9}}", "minReplicas is above maxReplicas"),
        (MODEL + "routers: {autoscaling: {by: queuedTokens}}", "prometheusUrl"),
        (MODEL + "workerGroups: [{name: a}, {name: a}]", "two are called a"),
        (MODEL + "workerGroups: null", "workerGroups is empty"),
        (
            MODEL + f"fullnameOverride: {'b' * 40}\nworkerGroups: [{{name: {'g' * 10}}}]",
            "g: .*51 characters; 50 are the",
        ),
        (MODEL + "commonLabels: {app.kubernetes.io/component: x}", "commonLabels: .*component is the chart's own"),
        (
            MODEL + "routers: {resources: {requests: {memory: 3Gi}}}",
            "routers: .*3Gi of memory, more than the limit 2Gi",
        ),
        (MODEL + "workerGroups: [{name: a, resources: {requests: {memory: 64Gi}}}]", "a: .*64Gi.*limit 32Gi"),
        (MODEL + "monitoring: {serviceMonitors: {enabled: true}}", "networkPolicy.monitoring"),
        (MODEL + "routers: {extraEnv: [{name: HOME, value: /}]}", "routers: extraEnv names HOME"),
        (MODEL + "workerGroups: [{name: a, extraEnv: [{name: B}, {name: B}]}]", "a: extraEnv names B twice"),
        ("routers: {extraEnv: [{name: A, value: 1}]}", "routers.extraEnv.0.value.*string"),
        (MODEL + "workerGroups: [{name: a, kvPreset: tq3}]", "kvPreset tq3 would do nothing in kvMode dense"),
        (MODEL + "tracing: {otlpEndpoint: 'http://o:4317'}", "networkPolicy.tracing"),
        (MODEL + "ray: {gcsFaultTolerance: {enabled: true, redisAddress: 'r:1'}}", "networkPolicy.redis"),
        (
            MODEL + "ray: {gcsFaultTolerance: {enabled: true}}\nnetworkPolicy: {redis: [{podSelector: {}}]}",
            "redisAddress",
        ),
    ],
)
@pytest.mark.parametrize("major", [3, 4])
def test_nonsense_is_refused_by_name(major: int, values: str, words: str) -> None:
    with pytest.raises(ValueError) as refused:
        render(values, major)
    said = str(refused.value).replace("\n", " ").replace("/", ".")
    assert re.search(words, said), said


def test_the_schema_knows_the_keys_of_the_values_and_no_others() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())

    def compare(path: str, value: Any, said: Any) -> None:
        if (
            "properties" not in said
            or not isinstance(value, dict)
            or path.endswith(("resources", "requests", "limits"))
        ):
            return
        assert said["additionalProperties"] is False, path
        assert set(value) == set(said["properties"]) - {"global"}, path
        for key, below in value.items():
            compare(f"{path}.{key}", below, said["properties"][key])

    values = yaml.safe_load((CHART / "values.yaml").read_text())
    compare("", values, schema)
    entry = schema["properties"]["workerGroups"]["items"]["properties"]
    assert set(entry) == {"name", *values["workerDefaults"]}


def test_every_value_is_described_and_the_readme_is_up_to_date() -> None:
    spec = importlib.util.spec_from_file_location("chart_readme", CHART / "readme.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    text = (CHART / "values.yaml").read_text()
    assert (CHART / "README.md").read_text() == module.readme(text), "run: python helm/readme.py"
    with pytest.raises(ValueError, match=r"routers\.replicas has no description"):
        module.values(text.replace("  # -- How many, where autoscaling is off.\n", ""))


# --- switched off ---

KINDS = {
    "ServiceAccount": "serviceAccount: {create: false}",
    "PodDisruptionBudget": "routers: {podDisruptionBudget: {enabled: false}}",
    "NetworkPolicy": "networkPolicy: {enabled: false}",
}


def test_nothing_is_there_for_what_is_off() -> None:
    basic = {"Deployment", "RayCluster", "Service", "Pod"}
    assert {each["kind"] for each in render(ALL_OFF)} == basic
    assert {each["kind"] for each in render(MODEL)} == basic | set(KINDS)
    for kind, off in KINDS.items():
        assert not of_kind(render(MODEL + off), kind)
    everything = {each["kind"] for each in render(ALL_ON)}
    custom = {
        "ServiceMonitor",
        "PodMonitor",
        "PrometheusRule",
        "ConfigMap",
        "PriorityClass",
        "HorizontalPodAutoscaler",
        "Job",
    }
    assert everything == basic | set(KINDS) | custom
    text = json.dumps(render(ALL_OFF))
    for word in ("tls", "/tokens", "TAILPACK_TOKEN", "RAY_AUTH_TOKEN", "priorityClassName", "topologySpread", "nvidia"):
        assert word not in text, word


def test_a_disruption_budget_of_one_pod_would_block_every_drain() -> None:
    budgets = {each["metadata"]["name"]: each["spec"] for each in of_kind(render(ALL_ON), "PodDisruptionBudget")}
    assert set(budgets) == {"rel-tailpack-router", "rel-tailpack-workers-big"}  # small has one pod
    assert budgets["rel-tailpack-workers-big"]["minAvailable"] == 2
    for budget in budgets.values():  # nor may pods that are not ready keep a node from being drained
        assert budget["unhealthyPodEvictionPolicy"] == "AlwaysAllow"


# --- names, labels, selectors ---


def selects(selector: Object, labels: Object) -> bool:
    return bool(selector) and selector.items() <= labels.items()


def selectors(objects: tuple[Object, ...]) -> list[tuple[str, Object]]:
    """(what, labels) of everything that selects pods of ours."""
    found: list[tuple[str, Object]] = []
    for each in objects:
        name = f"{each['kind']}/{each['metadata']['name']}"
        spec = each.get("spec", {})
        match each["kind"]:
            case "Service":
                found.append((name, spec["selector"]))
            case "NetworkPolicy":
                found.append((name, spec["podSelector"]["matchLabels"]))
            case "Deployment":
                found.append((name, spec["selector"]["matchLabels"]))
                spreads = spec["template"]["spec"].get("topologySpreadConstraints", ())
                found += [(f"{name} spread", spread["labelSelector"]["matchLabels"]) for spread in spreads]
            case "PodDisruptionBudget" | "PodMonitor":
                found.append((name, spec["selector"]["matchLabels"]))
    return found


@pytest.mark.parametrize("case", ["defaults", "all on", "all on, renamed", "all off"])
def test_selectors_select_pods_of_one_component(case: str) -> None:
    objects = render(MATRIX[case])
    labels = {name: pod["metadata"]["labels"] for name, pod in pods(objects).items()}
    for name, selector in selectors(objects):
        selected = {pod for pod, own in labels.items() if selects(selector, own)}
        assert selected, f"{name} selects no pod"
        components = {labels[pod]["app.kubernetes.io/component"] for pod in selected}
        assert len(components) == 1, (name, selected)
    for monitor in of_kind(objects, "ServiceMonitor"):
        wanted = monitor["spec"]["selector"]["matchLabels"]
        services = [s for s in of_kind(objects, "Service") if selects(wanted, s["metadata"]["labels"])]
        assert len(services) == 1  # with two of them each router would be scraped twice
        assert services[0]["spec"][
            "publishNotReadyAddresses"
        ]  # or nobody would see a drain, or a router without workers
        assert {e["port"] for e in monitor["spec"]["endpoints"]} <= {p["name"] for p in services[0]["spec"]["ports"]}


def test_routers_are_scraped_at_a_port_that_callers_do_not_reach() -> None:
    """Its page names the tenants. Also without an HTTP door."""
    objects = render(MODEL + "routers: {http: false}\n" + MONITORED)
    assert argument(container(objects, "router"), "--metrics") == "0.0.0.0:7703"
    (metrics,) = (s for s in of_kind(objects, "Service") if s["metadata"]["name"].endswith("router-metrics"))
    (port,) = metrics["spec"]["ports"]
    own = {p["name"]: p["containerPort"] for p in container(objects, "router")["ports"]}
    assert (port["port"], own[port["targetPort"]]) == (7703, 7703)


def test_two_releases_do_not_select_each_others_pods() -> None:
    for name, selector in selectors(render(ALL_ON)):
        assert selector["app.kubernetes.io/instance"] == RELEASE, name


def test_two_releases_share_no_name_and_no_series() -> None:
    """Of one namespace; one may be called as a group of the other is."""
    values = MODEL + MONITORED + "workerGroups: [{name: gpu}, {name: cpu}]"
    one, other = (render(values + f"\nfullnameOverride: {name}") for name in ("kv", "kv-gpu"))
    names = [{(each["kind"], each["metadata"]["name"]) for each in objects} for objects in (one, other)]
    assert not names[0] & names[1]
    (rule,) = of_kind(one, "PrometheusRule")
    wanted = set(re.findall(r'pod=~"([^"]*)"', json.dumps(rule).replace('\\"', '"')))
    (pattern,) = wanted
    own, theirs = (
        [f"{name}-router-6c4d5-x7b", *(f"{name}-{g}-worker-k2p9z" for g in ("gpu", "cpu"))] for name in ("kv", "kv-gpu")
    )
    assert all(re.fullmatch(pattern, pod) for pod in own)  # Prometheus anchors
    assert not any(re.fullmatch(pattern, pod) for pod in theirs)


def test_the_longest_names_fit() -> None:
    longest = (
        f"fullnameOverride: {'b' * 40}\nworkerGroups: [{{name: {'g' * 9}, replicas: 2}}]\nloadTest: {{enabled: true}}\n"
    )
    for objects in (render(MODEL + MONITORED + longest), render(MODEL, release="r" * 53)):
        for each in objects:
            assert len(each["metadata"]["name"]) <= 63, each["metadata"]["name"]
            assert all(len(value) <= 63 for value in each["metadata"]["labels"].values())


@pytest.mark.parametrize("release", ["1abc", "v1.2"])  # helm takes both
def test_a_release_whose_name_services_and_kuberay_refuse_is_refused_here(release: str) -> None:
    with pytest.raises(ValueError, match="must begin with a letter"):
        render(MODEL, release=release)
    assert render(MODEL + "fullnameOverride: kv", release=release)


def test_overrides_rename_everything_and_selectors_follow() -> None:
    for each in render(MATRIX["all on, renamed"]):
        if each["kind"] != "PriorityClass":
            assert each["metadata"]["name"].startswith("other"), each["metadata"]["name"]
        assert each["metadata"]["labels"]["app.kubernetes.io/name"] == "kv"
    assert "rel-tailpack" not in json.dumps(render(MATRIX["all on, renamed"]))


@every_case
def test_all_is_in_the_releases_namespace_and_labelled(case: str) -> None:
    for each in render(MATRIX[case]):
        assert each["metadata"].get("namespace") == (None if each["kind"] == "PriorityClass" else NAMESPACE)
        labels = each["metadata"]["labels"]
        assert labels["app.kubernetes.io/managed-by"] == "Helm" and labels["helm.sh/chart"] == "tailpack-0.1.0"
    for pod in pods(render(MATRIX[case])).values():
        # KubeRay lists its pods by this label: it must stay KubeRay's to set.
        assert "app.kubernetes.io/created-by" not in pod["metadata"]["labels"]


# --- pods ---


@every_case
def test_no_container_without_requests_probes_and_security(case: str) -> None:
    for name, pod in pods(render(MATRIX[case])).items():
        spec = pod["spec"]
        security = spec["securityContext"]
        assert security["runAsNonRoot"] and security["seccompProfile"] == {"type": "RuntimeDefault"}, name
        assert spec["automountServiceAccountToken"] is False, name
        for each in containers(pod).values():
            where = f"{name}: {each['name']}"
            assert {"cpu", "memory"} <= set(each["resources"]["requests"]), where
            limits = each["resources"]["limits"]
            assert quantity(limits["memory"]) >= quantity(each["resources"]["requests"]["memory"]), where
            assert each["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }, where
            ends_by_itself = spec.get("restartPolicy") == "Never"
            for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
                assert (probe in each) != ends_by_itself, where
            assert any(mount["mountPath"] == "/tmp" for mount in each["volumeMounts"]), where  # the root is read-only
            assert "latest" not in each["image"], where


@every_case
def test_ports_probes_services_and_listeners_agree(case: str) -> None:
    objects = render(MATRIX[case])
    for name, pod in pods(objects).items():
        ports = [port for each in containers(pod).values() for port in each.get("ports", ())]
        assert len({port["name"] for port in ports}) == len({port["containerPort"] for port in ports}) == len(ports), (
            name
        )
        for each in containers(pod).values():
            own = {port["name"]: port["containerPort"] for port in each.get("ports", ())}
            for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
                if probe not in each:
                    continue
                ((kind, check),) = ((k, v) for k, v in each[probe].items() if k in ("httpGet", "tcpSocket"))
                assert check["port"] in own, (name, probe)
                if kind == "httpGet":
                    assert f"--health=0.0.0.0:{own[check['port']]}" in each["command"], (name, probe)
                    assert "scheme" not in check  # that door is in plain HTTP
    for service in of_kind(objects, "Service"):
        for name, pod in pods(objects).items():
            if selects(service["spec"]["selector"], pod["metadata"]["labels"]):
                named_ports = {
                    p["name"]: p["containerPort"] for c in containers(pod).values() for p in c.get("ports", ())
                }
                for port in service["spec"]["ports"]:
                    assert named_ports[port["targetPort"]] == port["port"], (name, port)


@every_case
def test_our_command_line_knows_every_command_of_the_chart(case: str) -> None:
    seen = set()
    for name, pod in pods(render(MATRIX[case])).items():
        for each in containers(pod).values():
            if not each["name"].startswith("ray-"):
                command = each["command"]
                assert command[0] == "tailpack", name
                seen.add(" ".join(command[1:3]) if command[1] not in ("generate", "bench") else command[1])
                parse(command[1:])
    assert seen >= {"router serve", "kvstore serve", "worker node", "generate"}


def parse(arguments: list[str]) -> None:
    """As click does before it calls anything. Raises click.UsageError."""
    command: click.Command = cli
    context = click.Context(cli)
    while isinstance(command, click.Group) and (below := command.get_command(context, arguments[0])) is not None:
        command, arguments = below, arguments[1:]
    command.make_context("chart", list(arguments))


def test_the_order_of_a_worker_pods_start_and_end() -> None:
    pod = pods(render(ALL_ON))["RayCluster/rel-tailpack/big"]
    spec = pod["spec"]
    (kvstore,) = spec["initContainers"]
    assert (
        kvstore["name"] == "kvstore" and kvstore["restartPolicy"] == "Always"
    )  # up before the others, down after them
    assert "restartPolicy" not in spec  # Always: KubeRay says Never only under Ray's own autoscaler
    assert spec["containers"][0]["name"] == "ray-worker"  # KubeRay takes the first for Ray's
    assert spec["shareProcessNamespace"] is True
    (cluster,) = of_kind(render(ALL_ON), "RayCluster")
    assert cluster["spec"]["enableInTreeAutoscaling"] is False
    mounts = [{m["mountPath"]: m["name"] for m in each["volumeMounts"]} for each in containers(pod).values()]
    for path in ("/run/tailpack", "/dev/shm", "/tmp"):
        assert len({mounted[path] for mounted in mounts}) == 1, path
    assert "nvidia.com/gpu" not in json.dumps(kvstore)
    ray = spec["containers"][0]["resources"]
    assert ray["limits"]["nvidia.com/gpu"] == ray["requests"]["nvidia.com/gpu"] == "8"
    assert "nvidia.com/gpu" not in json.dumps(spec["containers"][1])


@every_case
def test_grace_is_longer_than_the_longest_answer(case: str) -> None:
    for name, pod in pods(render(MATRIX[case])).items():
        for each in containers(pod).values():
            drains = [float(a.partition("=")[2]) for a in each.get("command", ()) if a.startswith("--drain-s=")]
            for drain_s in drains:
                before_s = each.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
                assert pod["spec"]["terminationGracePeriodSeconds"] >= drain_s + before_s + 15, name
            if each["name"] == "ray-worker":
                script = each["lifecycle"]["preStop"]["exec"]["command"][-1]
                bound_s = int(re.search(r"-ge (\d+)", script)[1])  # type: ignore[index]
                drain_s = float(argument(containers(pod)["workers"], "--drain-s"))
                ray_s = 30  # on SIGTERM `ray start --block` waits so long for actors, if there are any yet
                assert drain_s + 10 < bound_s < pod["spec"]["terminationGracePeriodSeconds"] - ray_s
                assert f"touch {argument(containers(pod)['workers'], '--drain-file')}; " in script
                assert f"-e {argument(containers(pod)['workers'], '--drained-file')} " in script
            if "livenessProbe" in each:
                assert each["livenessProbe"]["terminationGracePeriodSeconds"] <= 60  # what hangs does not drain


def argument(each: Object, name: str) -> str:
    (value,) = (a.partition("=")[2] for a in each["command"] if a.startswith(f"{name}="))
    return str(value)


def test_a_start_is_over_when_a_first_token_was_generated() -> None:
    for values, seconds in ((MODEL, 1800), (MODEL + "workerDefaults: {startupSeconds: 61}", 61)):
        workers = container(render(values), "workers")
        assert workers["startupProbe"]["httpGet"]["path"] == "/health/ready"  # worker/shell.py: after warm_up
        # What a dead worker's sequences are kept for: the next one's start.
        assert argument(container(render(values), "kvstore"), "--orphan-timeout") == str(seconds)
        wait_s = workers["startupProbe"]["periodSeconds"] * workers["startupProbe"]["failureThreshold"]
        assert seconds <= wait_s < seconds + 10
    # A router that waited for a worker at its start would be ended while a large model is loading.
    router = container(render(MODEL), "router")
    assert router["startupProbe"]["httpGet"]["path"] == "/health/live"
    assert router["readinessProbe"]["httpGet"]["path"] == "/health/ready"
    # Nor may its Deployment be called failed meanwhile, as `kubectl rollout status` and others do.
    (deployment,) = of_kind(render(ALL_ON + "workerDefaults: {startupSeconds: 7200}"), "Deployment")
    assert deployment["spec"]["progressDeadlineSeconds"] > 7200


def test_what_else_a_group_is_given_reaches_its_containers() -> None:
    objects = render(ALL_ON)
    for group, tokens, names in (("big", ["32768"], {"B"}), ("small", [], set[str]())):
        pod = containers(pods(objects)[f"RayCluster/rel-tailpack/{group}"])
        told = [a.partition("=")[2] for a in pod["workers"]["command"] if a.startswith("--max-sequence-tokens=")]
        assert told == tokens
        for each in pod.values():  # workers run in Ray's
            assert {e["name"] for e in each["env"]} & {"A", "B"} == names, each["name"]
    assert {"name": "A", "value": "1"} in container(objects, "router")["env"]


def test_memory_limits_count_arenas_where_the_kernel_charges_them() -> None:
    on_cpu = containers(pods(render(ALL_ON))["RayCluster/rel-tailpack/small"])["kvstore"]["resources"]["limits"]
    assert quantity(on_cpu["memory"]) == (2 * 1024 + 1024) * 2**20  # two workers' arenas and the store itself
    on_gpu = containers(pods(render(ALL_ON))["RayCluster/rel-tailpack/big"])["kvstore"]["resources"]["limits"]
    assert quantity(on_gpu["memory"]) == 1024 * 2**20


def test_each_group_is_found_by_its_own_name_and_ports() -> None:
    objects = render(ALL_ON)
    router = container(objects, "router")
    asked = [a.partition("=")[2] for a in router["command"] if a.startswith("--worker-dns=")]
    assert asked == [
        "rel-tailpack-workers-big.serving.svc.cluster.local:7730-7737",
        "rel-tailpack-workers-small.serving.svc.cluster.local:7730-7731",
    ]
    for group, count in (("big", 8), ("small", 2)):
        service = named(objects, "Service", f"rel-tailpack-workers-{group}")["spec"]
        assert service["clusterIP"] == "None" and service["publishNotReadyAddresses"] is True
        assert [port["port"] for port in service["ports"]] == [7730 + i for i in range(count)]
        pod = pods(objects)[f"RayCluster/rel-tailpack/{group}"]
        assert argument(containers(pod)["workers"], "--workers") == str(count)


def test_rays_token_is_the_same_for_ray_and_for_its_driver() -> None:
    for values, secret in ((MODEL, "rel-tailpack"), (ALL_ON, "ray-token")):
        (cluster,) = of_kind(render(values), "RayCluster")
        assert cluster["spec"]["authOptions"]["mode"] == "token"
        # Without secretName KubeRay makes a Secret called like the RayCluster.
        assert cluster["spec"]["authOptions"].get("secretName", cluster["metadata"]["name"]) == secret
        for pod in pods(render(values)).values():
            if "workers" in containers(pod):
                env = {each["name"]: each for each in containers(pod)["workers"]["env"]}
                assert env["RAY_AUTH_MODE"]["value"] == "token"
                assert env["RAY_AUTH_TOKEN"]["valueFrom"]["secretKeyRef"] == {"name": secret, "key": "auth_token"}
    for pod in pods(render(ALL_OFF)).values():
        for each in containers(pod).values():
            if each["name"] in ("ray-head", "ray-worker", "workers"):
                assert {"name": "RAY_AUTH_MODE", "value": "disabled"} in each["env"]


def test_with_its_state_in_redis_a_lost_head_is_waited_for() -> None:
    (cluster,) = of_kind(render(ALL_ON), "RayCluster")
    assert cluster["spec"]["gcsFaultToleranceOptions"] == {
        "redisAddress": "redis:6379",
        "redisPassword": {"valueFrom": {"secretKeyRef": {"name": "redis", "key": "password"}}},
        "externalStorageNamespace": "x",
    }
    # KubeRay sets it for Ray's containers, and so it must be for their driver.
    for values, waits in ((ALL_ON, True), (MODEL, False)):
        for pod in pods(render(values)).values():
            if "workers" in containers(pod):
                env = {each["name"] for each in containers(pod)["workers"]["env"]}
                assert ("RAY_gcs_rpc_server_reconnect_timeout_s" in env) == waits


# --- TLS and tokens ---


def test_every_door_has_its_own_certificate() -> None:
    objects = render(ALL_ON)
    secrets = {"router": "r-tls", "kvstore": "w-tls", "workers": "w-tls", "generate": "c-tls", "bench": "c-tls"}
    for pod in pods(objects).values():
        volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
        for each in containers(pod).values():
            if each["name"] in secrets:
                assert volumes["tls"]["secret"]["secretName"] == secrets[each["name"]]
                mount = next(m for m in each["volumeMounts"] if m["name"] == "tls")
                assert mount["readOnly"] and "subPath" not in mount  # a subPath never sees a renewed certificate
    doors = [each for pod in pods(objects).values() for each in containers(pod).values()]
    doors = [each for each in doors if each["name"] in ("router", "kvstore", "workers")]
    for door in doors:
        assert argument(door, "--tls-cert") == "/etc/tailpack/tls/tls.crt"
        assert argument(door, "--tls-client-ca") == "/etc/tailpack/tls/ca.crt"
    router = container(objects, "router")
    assert argument(router, "--tls-server-name") == "rel-tailpack-workers"
    assert argument(router, "--tls-client-cert") and argument(router, "--tokens") == "/etc/tailpack/tokens/tokens.toml"
    for name in ("generate", "bench"):
        client = container(objects, name)
        assert argument(client, "--tls-ca") and argument(client, "--tls-client-cert")
        (token,) = (each for each in client["env"] if each["name"] == "TAILPACK_TOKEN")
        assert token["valueFrom"]["secretKeyRef"] == {"name": "one-token", "key": "token"}


def test_certificates_of_cert_manager_have_the_names_that_are_asked_for() -> None:
    objects = render(example("multi-tenant-mtls"))
    certificates = {each["spec"]["secretName"]: each["spec"] for each in of_kind(objects, "Certificate")}
    mounted = {
        volume["secret"]["secretName"]
        for pod in pods(objects).values()
        for volume in pod["spec"]["volumes"]
        if volume["name"] == "tls"
    }
    assert mounted == set(certificates) == {f"rel-tailpack-{role}-tls" for role in ("router", "worker", "client")}
    asked = argument(container(objects, "generate"), "--router").partition(":")[0]
    assert asked in certificates["rel-tailpack-router-tls"]["dnsNames"]
    name = argument(container(objects, "router"), "--tls-server-name")
    assert name in certificates["rel-tailpack-worker-tls"]["dnsNames"]
    for role, spec in certificates.items():  # routers and doctors call workers
        assert ("server auth" in spec["usages"]) == ("client-tls" not in role) and "client auth" in spec["usages"]
    for monitor in (*of_kind(objects, "PodMonitor"), *of_kind(objects, "ServiceMonitor")):
        role = "worker" if monitor["kind"] == "PodMonitor" else "router"
        for endpoint in monitor["spec"].get("podMetricsEndpoints", monitor["spec"].get("endpoints")):
            tls = endpoint["tlsConfig"]
            assert (
                endpoint["scheme"] == "https"
                and tls["serverName"] in certificates[f"rel-tailpack-{role}-tls"]["dnsNames"]
            )
            assert tls["cert"]["secret"]["name"] == tls["keySecret"]["name"] == "rel-tailpack-client-tls"


# --- who calls whom ---

GRPC, HTTP, GCS = 7700, 7701, 6379
DNS = {53, "53/UDP"}  # all others are TCP
RAY = (6380, 6384, 20000, 20199)
OUTSIDE = {
    "app": ("apps", {"a": "b"}),
    "prometheus": ("monitoring", {"a": "c"}),
    "otel": ("monitoring", {"a": "d"}),
    "dns": ("kube-system", {"kubernetes.io/metadata.name": "kube-system"}),
    "stranger": ("strangers", {"a": "z"}),
}
"""Pods of other namespaces: (namespace, its labels)."""

ALLOWED: dict[tuple[str, str], set[Any]] = {
    ("app", "router"): {GRPC, HTTP},
    ("client", "router"): {GRPC},
    ("prometheus", "router"): {7703},
    ("prometheus", "worker"): {7721, *range(7750, 7758)},
    ("router", "worker"): set(range(7730, 7738)),
    ("worker", "worker"): set(RAY),
    ("worker", "head"): {GCS, *RAY},
    ("head", "worker"): set(RAY),
    ("head", "redis"): {6379},
    ("router", "otel"): {4317},
    ("worker", "otel"): {4317},
    **{(each, "dns"): DNS for each in ("router", "worker", "head", "client")},
}
OTHERS = {22, 7702, 7722, 7723, 7738, 7758, 8265, 10001, 6385, 6386, 20200, "7700/UDP"}
PROBED: set[Any] = set[Any]().union(*ALLOWED.values()) | OTHERS


def test_the_network_policies_are_the_matrix_and_nothing_else() -> None:
    objects = render(ALL_ON)
    own = {
        pod["metadata"]["labels"]["app.kubernetes.io/component"]: pod["metadata"]["labels"]
        for pod in pods(objects).values()
    }
    assert set(own) == {"router", "worker", "head", "client"}
    own["redis"] = {"a": "e"}
    everybody: dict[str, Who] = {name: (NAMESPACE, labels, {}) for name, labels in own.items()}
    everybody |= {name: (namespace, {}, labels) for name, (namespace, labels) in OUTSIDE.items()}
    policies = of_kind(objects, "NetworkPolicy")
    for source, target in product(everybody, everybody):
        open_ports = {
            port
            for port in PROBED
            if permits(policies, everybody[source], everybody[target], "egress", port)
            and permits(policies, everybody[target], everybody[source], "ingress", port)
        }
        # Between pods that no policy of ours selects, nothing is ours to say.
        if not {source, target} <= {*OUTSIDE, "redis"}:
            assert open_ports == ALLOWED.get((source, target), set()), (source, target)


Who = tuple[str, Object, Object]
"""(namespace, labels, labels of the namespace)."""


def permits(policies: list[Object], who: Who, other: Who, direction: str, port: int | str) -> bool:
    """As Kubernetes reads policies: who is selected by none is free; else one of them must let it through."""
    selecting = [
        p for p in policies if who[0] == NAMESPACE and selects(p["spec"]["podSelector"]["matchLabels"], who[1])
    ]
    selecting = [p for p in selecting if direction.capitalize() in p["spec"]["policyTypes"]]
    if not selecting:
        return True
    rules = [rule for policy in selecting for rule in policy["spec"].get(direction, ())]
    number, protocol = (int(port.partition("/")[0]), "UDP") if isinstance(port, str) else (port, "TCP")
    side = "to" if direction == "egress" else "from"
    return any(
        any(is_peer(peer, other) for peer in rule[side])
        and any(
            each["port"] <= number <= each.get("endPort", each["port"]) and each.get("protocol", "TCP") == protocol
            for each in rule["ports"]
        )
        for rule in rules
    )


def is_peer(peer: Object, other: Who) -> bool:
    namespace, labels, of_namespace = other
    if "namespaceSelector" in peer:
        there = peer["namespaceSelector"].get("matchLabels", {}).items() <= of_namespace.items()
    else:
        there = namespace == NAMESPACE
    wanted: Object = peer.get("podSelector", {}).get("matchLabels", {})
    return there and wanted.items() <= labels.items()


@pytest.mark.parametrize(
    ("told", "redis", "collector"),
    [((0, 0), 6380, 4318), ((7, 8), 7, 8)],
)
def test_ports_of_redis_and_of_the_collector_are_their_addresses_unless_told(
    told: tuple[int, int], redis: int, collector: int
) -> None:
    given = """
tracing: {otlpEndpoint: "http://otel.monitoring:4318/"}
ray: {gcsFaultTolerance: {enabled: true, redisAddress: "redis.redis.svc:6380", redisPort: %d}}
networkPolicy: {tracing: [{podSelector: {}}], tracingPort: %d, redis: [{podSelector: {}}]}
"""
    policies = {each["metadata"]["name"]: each for each in of_kind(render(MODEL + given % told), "NetworkPolicy")}
    for component, port in (("head", redis), ("router", collector), ("worker", collector)):
        rules = policies[f"rel-tailpack-{component}"]["spec"]["egress"]
        assert port in {each["port"] for rule in rules for each in rule["ports"]}, component


def test_rays_ports_are_those_that_the_policies_let_through() -> None:
    (cluster,) = of_kind(render(ALL_ON), "RayCluster")
    for each in (cluster["spec"]["headGroupSpec"], *cluster["spec"]["workerGroupSpecs"]):
        params = each["rayStartParams"]
        ports = {int(params[f"{name}-port"]) for name in ("node-manager", "object-manager", "runtime-env-agent")}
        ports |= {int(params["dashboard-agent-grpc-port"]), int(params["dashboard-agent-listen-port"])}
        assert ports == set(range(6380, 6385))
        assert (int(params["min-worker-port"]), int(params["max-worker-port"])) == RAY[2:]
        assert int(params["metrics-export-port"]) == 6385


# --- alerts ---


def test_alerts_say_how_bad_and_what() -> None:
    (rule,) = of_kind(render(ALL_ON), "PrometheusRule")
    assert rule["metadata"]["labels"]["release"] == "prometheus"
    alerts = {each["alert"]: each for group in rule["spec"]["groups"] for each in group["rules"]}
    assert len(alerts) == 13
    for name, alert in alerts.items():
        assert name.startswith("Tailpack") and alert["annotations"]["summary"].endswith(".")
        assert alert["labels"]["severity"] in ("warning", "critical")
    for query in (*promql(render(ALL_ON)), *promql(render(MATRIX["KEDA"]))):
        assert query.selectors and all({"namespace", "pod"} <= labels for _, labels in query.selectors), (
            query.expression
        )
    for name in ("TailpackDrainStuck", "TailpackWorkerDrainStuck"):
        assert int(alerts[name]["for"].removesuffix("s")) > 3600  # the longest answer of these values
    plain = MODEL + "monitoring: {rules: {enabled: true}}"
    assert "TailpackCertificateExpires" not in json.dumps(of_kind(render(plain), "PrometheusRule"))  # no TLS


# --- notes and the deployment page ---


def test_the_deployment_page_gets_to_a_token_in_ten_commands() -> None:
    """What can be told of it without a cluster: files, names and sizes are those of the chart."""
    page = (CHART / "DEPLOY.md").read_text()
    commands = [line for block in page.split("```")[1:4:2] for line in block.strip().splitlines()]
    assert len(commands) <= 10 and commands[-1].startswith("tailpack generate")
    (install,) = (each.split() for each in commands if each.startswith("helm install tailpack"))
    values = CHART.parent / install[install.index("--values") + 1]
    objects = render(values.read_text() + "image: {repository: registry/tailpack}", release="tailpack")
    (deployment,) = of_kind(objects, "Deployment")
    assert any(f"rollout status deployment/{deployment['metadata']['name']} " in each for each in commands)
    assert any("port-forward service/tailpack 7700 " in each for each in commands)
    assert named(objects, "Service", "tailpack")
    built = next(each.split()[each.split().index("--tag") + 1] for each in commands if each.startswith("docker build"))
    images = {each["image"] for pod in pods(objects).values() for each in containers(pod).values()}
    assert images == {built.replace("REGISTRY", "registry")}
    asked = [
        each["resources"]["requests"]
        for name, pod in pods(objects).items()
        if not name.startswith("Pod/")
        for each in containers(pod).values()
    ]
    cores, memory = (sum(quantity(each[what]) for each in asked) for what in ("cpu", "memory"))
    assert f"ask for {cores:g} cores and {memory / 2**30:g} GiB" in page


def test_notes_give_the_first_commands() -> None:
    done = helm(
        4,
        "install",
        RELEASE,
        str(CHART),
        "--namespace",
        NAMESPACE,
        "--dry-run=client",
        values=example("multi-tenant-mtls"),
    )
    assert done.returncode == 0, done.stderr
    notes = done.stdout.partition("NOTES:")[2]
    commands = [line.strip() for line in notes.splitlines() if line.startswith("  ")]
    assert [command.split()[0] for command in commands] == ["kubectl", "kubectl", "tailpack"]
    assert "--tls-ca" in commands[2] and "--token-file" in commands[2]
    assert "taken" not in notes and "plain text" not in notes
    plain = helm(4, "install", RELEASE, str(CHART), "--dry-run=client", values=MODEL).stdout.partition("NOTES:")[2]
    assert "plain text" in plain and "not asked for tokens" in plain
    assert "LoadBalancer" not in plain
    balanced = MODEL + "routers: {service: {type: LoadBalancer}}"
    told = helm(4, "install", RELEASE, str(CHART), "--dry-run=client", values=balanced).stdout
    assert "of type LoadBalancer, but the NetworkPolicies let in" in told

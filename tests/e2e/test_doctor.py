"""`tailpack doctor` on a real cluster, in order and not."""

from __future__ import annotations

import json
from typing import Any

import pytest
from click.testing import CliRunner

from tests.e2e.cluster import ClusterProcess
from worker.doctor_cli import doctor

LOOKED_AT = {
    "router's port",
    "router",
    "workers",
    "workers agree",
    "versions",
    "kvstore sockets",
    "kvstore",
    "integrity",
    "arenas",
    "memory limit",
    "GPUs",
    "/dev/shm",
}


def examined(*arguments: str) -> tuple[int, dict[str, Any]]:
    done = CliRunner().invoke(doctor, [*arguments, "--json"])
    answer = json.loads(done.stdout)
    assert done.exit_code == answer["status"]
    return done.exit_code, {finding["check"]: finding for finding in answer["findings"]}


def test_a_cluster_in_order_passes_every_check(cluster: ClusterProcess) -> None:
    status, findings = examined("--router", cluster.router)
    assert status == 0, findings
    assert findings.keys() == LOOKED_AT
    assert findings["arenas"]["what"].startswith("2 of 2 devices attached")
    lines = CliRunner().invoke(doctor, ["--router", cluster.router]).output.splitlines()
    assert len([line for line in lines if line.startswith("ok ")]) >= len(LOOKED_AT) - 1


def test_workers_can_be_asked_without_a_router(cluster: ClusterProcess) -> None:
    status, findings = examined(*(f"--worker={address}" for address in cluster.workers))
    assert status == 0, findings
    assert findings.keys() == LOOKED_AT - {"router", "router's port"}
    status, findings = examined(f"--worker={cluster.workers[0]}", "--worker=127.0.0.1:1")
    assert status == 1 and "127.0.0.1:1 does not answer" in findings["worker's port"]["what"]


@pytest.mark.parametrize(
    ("arguments", "check", "what"),
    [
        (["--gpus", "1"], "GPUs", "1 expected, 0 visible"),
        (["--resolve", "no-such.invalid"], "dns", "no-such.invalid"),
        (["--tokens", "/none.toml"], "tokens", "cannot be read"),
        (["--kv-socket", "/none/kvstore.sock"], "kvstore", "KVSTORE_NOT_THERE"),
        (["--router", "127.0.0.1:1"], "router", "127.0.0.1:1"),
        (["--tls-ca", "/none.pem"], "client certificate", "TLS_FILE_MISSING"),
    ],
)
def test_what_is_wrong_is_found(cluster: ClusterProcess, arguments: list[str], check: str, what: str) -> None:
    status, findings = examined("--router", cluster.router, *arguments)
    assert status == 1
    assert findings[check]["status"] == "FAIL" and what in findings[check]["what"] and findings[check]["do"]

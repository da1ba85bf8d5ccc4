"""How long certificates are still good for, as a metric."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from protos.metrics import LazyCollector
from protos.tls import ServerCertificate


class CertificateCollector(LazyCollector):
    """Of a process's doors. None: they have no certificate, and the metric is not there."""

    def __init__(self, certificate: ServerCertificate | None) -> None:
        self._certificate = certificate

    def collect(self) -> Iterable[Metric]:
        if self._certificate is not None:
            yield GaugeMetricFamily(
                "tailpack_tls_certificate_expires_in_seconds",
                "Until the certificate in force expires; negative: it has.",
                value=self._certificate.expires_in_s(),
            )

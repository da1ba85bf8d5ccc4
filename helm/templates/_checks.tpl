{{/* What a schema cannot say, or not in words that help. */}}
{{- define "tailpack.checks" -}}
{{- $v := .Values -}}
{{- $full := include "tailpack.fullname" . -}}
{{- if not (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" $full) }}
{{- fail (printf "the name %s must begin with a letter and have letters, digits and - only, for Services and KubeRay: set fullnameOverride, or call the release otherwise" $full) }}
{{- end }}
{{- range $label, $_ := $v.commonLabels }}
{{- if regexMatch "^(app[.]kubernetes[.]io/(name|instance|component|version|managed-by)|helm[.]sh/chart|tailpack/group)$" $label }}
{{- fail (printf "commonLabels: %s is the chart's own (nameOverride changes app.kubernetes.io/name)" $label) }}
{{- end }}
{{- end }}
{{- if not $v.workerGroups }}
{{- fail "workerGroups is empty: name one group" }}
{{- end }}
{{- if and $v.tls.clientCertificates (eq $v.tls.mode "none") }}
{{- fail "tls.clientCertificates is on, but tls.mode is none: there is no TLS to ask for certificates" }}
{{- end }}
{{- if and $v.networkPolicy.enabled $v.tracing.otlpEndpoint (not $v.networkPolicy.tracing) }}
{{- fail "networkPolicy.tracing is empty: say where the collector of traces is, as NetworkPolicy peers, or no span gets there" }}
{{- end }}
{{- if and $v.networkPolicy.enabled $v.monitoring.serviceMonitors.enabled (not $v.networkPolicy.monitoring) }}
{{- fail "networkPolicy.monitoring is empty: say where Prometheus is, as NetworkPolicy peers, or it does not get at the metrics" }}
{{- end }}
{{- if and $v.networkPolicy.enabled $v.ray.gcsFaultTolerance.enabled (not $v.networkPolicy.redis) }}
{{- fail "networkPolicy.redis is empty: say where Redis is, as NetworkPolicy peers, or Ray does not get there" }}
{{- end }}
{{- if le (int $v.monitoring.rules.requestAgeSeconds) (int $v.longestStreamSeconds) }}
{{- if $v.monitoring.rules.enabled }}
{{- fail (printf "monitoring.rules.requestAgeSeconds is %d: above longestStreamSeconds, %d, or every long answer is an alert" (int $v.monitoring.rules.requestAgeSeconds) (int $v.longestStreamSeconds)) }}
{{- end }}
{{- end }}
{{- if gt (int $v.routers.autoscaling.minReplicas) (int $v.routers.autoscaling.maxReplicas) }}
{{- fail "routers.autoscaling: minReplicas is above maxReplicas" }}
{{- end }}
{{- range $what, $resources := dict "routers" $v.routers.resources "ray.head" $v.ray.head.resources "loadTest" $v.loadTest.resources }}
{{- include "tailpack.checkResources" (list $what $resources) }}
{{- end }}
{{- include "tailpack.checkEnv" (list "routers" $v.routers.extraEnv) }}
{{- $names := list }}
{{- range $v.workerGroups }}
{{- if has .name $names }}
{{- fail (printf "workerGroups: two are called %s" .name) }}
{{- end }}
{{- $names = append $names .name }}
{{- $pods := printf "%s-%s" $full .name }}
{{- if gt (len $pods) 50 }}
{{- fail (printf "workerGroups, %s: %s has %d characters; 50 are the most, for KubeRay cuts longer names of pods: take a shorter name, or set fullnameOverride" .name $pods (len $pods)) }}
{{- end }}
{{- $group := mustMergeOverwrite (deepCopy $v.workerDefaults) . }}
{{- include "tailpack.checkResources" (list (printf "workerGroups, %s" .name) $group.resources) }}
{{- include "tailpack.checkEnv" (list (printf "workerGroups, %s" .name) $group.extraEnv) }}
{{- if and $group.kvPreset (ne $group.kvMode "turboquant") }}
{{- fail (printf "workerGroups, %s: kvPreset %s would do nothing in kvMode %s" .name $group.kvPreset $group.kvMode) }}
{{- end }}
{{- end }}
{{- end }}

{{/* Of two with one name, one would be dropped. Argument: list of what and its extraEnv. */}}
{{- define "tailpack.checkEnv" -}}
{{- $taken := list "HOME" "POD_NAME" "RAY_ADDRESS" "RAY_AUTH_MODE" "RAY_AUTH_TOKEN" "RAY_USAGE_STATS_ENABLED" "RAY_gcs_rpc_server_reconnect_timeout_s" }}
{{- $what := index . 0 }}
{{- range index . 1 }}
{{- if has .name $taken }}
{{- fail (printf "%s: extraEnv names %s twice, or one that the chart or KubeRay sets" $what .name) }}
{{- end }}
{{- $taken = append $taken .name }}
{{- end }}
{{- end }}

{{/* KubeRay tells of what Kubernetes refuses in events only. Argument: list of what and its resources. */}}
{{- define "tailpack.checkResources" -}}
{{- $what := index . 0 -}}
{{- $resources := index . 1 -}}
{{- range $name, $asked := $resources.requests }}
{{- $most := get $resources.limits $name }}
{{- if and $most (gt (include "tailpack.amount" $asked | float64) (include "tailpack.amount" $most | float64)) }}
{{- fail (printf "%s: resources.requests has %v of %s, more than the limit %v" $what $asked $name $most) }}
{{- end }}
{{- end }}
{{- end }}

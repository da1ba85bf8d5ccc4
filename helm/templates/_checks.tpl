{{/* What a schema cannot say, or not in words that help. */}}
{{- define "tailpack.checks" -}}
{{- $v := .Values -}}
{{- if and $v.tls.clientCertificates (eq $v.tls.mode "none") }}
{{- fail "tls.clientCertificates is on, but tls.mode is none: there is no TLS to ask for certificates" }}
{{- end }}
{{- if and $v.networkPolicy.enabled $v.tracing.otlpEndpoint (not $v.networkPolicy.tracing) }}
{{- fail "networkPolicy.tracing is empty: say where the collector of traces is, as NetworkPolicy peers, or no span gets there" }}
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
{{- $names := list }}
{{- range $v.workerGroups }}
{{- if has .name $names }}
{{- fail (printf "workerGroups: two are called %s" .name) }}
{{- end }}
{{- $names = append $names .name }}
{{- $group := mustMergeOverwrite (deepCopy $v.workerDefaults) . }}
{{- if and $group.kvPreset (ne $group.kvMode "turboquant") }}
{{- fail (printf "workerGroups, %s: kvPreset %s would do nothing in kvMode %s" .name $group.kvPreset $group.kvMode) }}
{{- end }}
{{- end }}
{{- end }}

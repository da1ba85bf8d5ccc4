{{/* Where everything listens. Constants: the NetworkPolicies, probes and Services of this chart agree on them. */}}
{{- define "tailpack.ports" -}}
routerGrpc: 7700
routerHttp: 7701
routerHealth: 7702
routerMetrics: 7703
kvstoreMetrics: 7721
kvstoreHealth: 7722
workersHealth: 7723
worker: 7730
workerMetrics: 7750
gcs: 6379
rayNodeManager: 6380
rayObjectManager: 6381
rayRuntimeEnvAgent: 6382
rayAgentGrpc: 6383
rayAgentHttp: 6384
rayMetrics: 6385 # nothing is there: Ray has metrics with its extra "default" only, which the images do without
rayWorkerFirst: 20000
rayWorkerLast: 20199
{{- end }}

{{/* Lines at an indentation; nothing, not even an empty line, where there are none. Argument: list of text and spaces. */}}
{{- define "tailpack.lines" -}}
{{- with trim (index . 0) }}{{ . | nindent (index $ 1) }}{{ end -}}
{{- end }}

{{- define "tailpack.name" -}}
{{- .Values.nameOverride | default .Chart.Name | trunc 40 | trimSuffix "-" }}
{{- end }}

{{/* Short: KubeRay makes names of its own from it, and cuts long ones. */}}
{{- define "tailpack.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" }}
{{- else if contains (include "tailpack.name" .) .Release.Name }}
{{- .Release.Name | trunc 40 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name (include "tailpack.name" .) | trunc 40 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{/* What selects the pods of one component. Argument: list of root and component. */}}
{{- define "tailpack.selector" -}}
{{- $root := index . 0 -}}
app.kubernetes.io/name: {{ include "tailpack.name" $root }}
app.kubernetes.io/instance: {{ $root.Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end }}

{{- define "tailpack.labels" -}}
{{- $root := index . 0 -}}
{{ include "tailpack.selector" . }}
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ $root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" $root.Chart.Name $root.Chart.Version | replace "+" "_" }}
{{- with $root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Argument: list of root and variant, cpu or gpu. */}}
{{- define "tailpack.image" -}}
{{- $root := index . 0 -}}
{{- $image := $root.Values.image -}}
{{- $variant := index . 1 | eq "gpu" | ternary $image.gpu $image.cpu -}}
{{- printf "%s:%s-%s" $image.repository ($image.tag | default $root.Chart.AppVersion) $variant.variant -}}
{{- with $variant.digest }}@{{ . }}{{ end -}}
{{- end }}

{{- define "tailpack.serviceAccountName" -}}
{{- if .Values.serviceAccount.create }}
{{- .Values.serviceAccount.name | default (include "tailpack.fullname" .) }}
{{- else }}
{{- .Values.serviceAccount.name | default "default" }}
{{- end }}
{{- end }}

{{/* What every pod has in common. Argument: root. */}}
{{- define "tailpack.pod" -}}
serviceAccountName: {{ include "tailpack.serviceAccountName" . | quote }}
automountServiceAccountToken: false
enableServiceLinks: false
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- if or .Values.priorityClass.create .Values.priorityClass.name }}
priorityClassName: {{ .Values.priorityClass.name | default (include "tailpack.fullname" .) | quote }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: {{ int .Values.security.runAsUser }}
  runAsGroup: {{ int .Values.security.runAsUser }}
  fsGroup: {{ int .Values.security.runAsUser }}
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile:
    type: RuntimeDefault
{{- end }}

{{- define "tailpack.securityContext" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}

{{/* Where a pod goes. Argument: the values that may have nodeSelector, tolerations, affinity. */}}
{{- define "tailpack.placement" -}}
{{- with .nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "tailpack.modelPath" -}}
{{- if eq .Values.model.source "pvc" -}}/models/served{{- else -}}{{ .Values.model.path }}{{- end -}}
{{- end }}

{{- define "tailpack.modelName" -}}
{{- $folder := ternary .Values.model.pvc.subPath .Values.model.path (eq .Values.model.source "pvc") -}}
{{- .Values.model.name | default (base $folder | trimAll ".") | required "model.name: say what callers ask for" -}}
{{- end }}

{{- define "tailpack.modelMount" -}}
{{- if eq .Values.model.source "pvc" }}
- name: model
  mountPath: /models/served
  {{- with .Values.model.pvc.subPath }}
  subPath: {{ . | quote }}
  {{- end }}
  readOnly: true
{{- end }}
{{- end }}

{{- define "tailpack.modelVolume" -}}
{{- if eq .Values.model.source "pvc" }}
- name: model
  persistentVolumeClaim:
    claimName: {{ required "model.pvc.claimName: name the PersistentVolumeClaim that holds the model" .Values.model.pvc.claimName | quote }}
    readOnly: true
{{- end }}
{{- end }}

{{- define "tailpack.tls" -}}
{{- if ne .Values.tls.mode "none" }}true{{ end }}
{{- end }}

{{/* The Secret of one role: router, worker or client. Argument: list of root and role. */}}
{{- define "tailpack.tlsSecret" -}}
{{- $root := index . 0 -}}
{{- $role := index . 1 -}}
{{- if eq $root.Values.tls.mode "certManager" -}}
{{- printf "%s-%s-tls" (include "tailpack.fullname" $root) $role -}}
{{- else -}}
{{- required (printf "tls.secrets.%s: name the Secret with tls.crt, tls.key and ca.crt" $role) (get $root.Values.tls.secrets $role) -}}
{{- end -}}
{{- end }}

{{/* A whole Secret as a folder, never by subPath, so that renewed certificates arrive. Argument: list of root and role. */}}
{{- define "tailpack.tlsVolume" -}}
{{- if include "tailpack.tls" (index . 0) }}
- name: tls
  secret:
    secretName: {{ include "tailpack.tlsSecret" . | quote }}
    defaultMode: 288 # 0440, for fsGroup
{{- end }}
{{- end }}

{{- define "tailpack.tlsMount" -}}
{{- if include "tailpack.tls" . }}
- name: tls
  mountPath: /etc/tailpack/tls
  readOnly: true
{{- end }}
{{- end }}

{{/* The name in the certificates of workers, for routers and Prometheus reach pods by address. */}}
{{- define "tailpack.workerServerName" -}}
{{ include "tailpack.fullname" . }}-workers
{{- end }}

{{- define "tailpack.serverTlsArgs" -}}
{{- if include "tailpack.tls" . }}
- --tls-cert=/etc/tailpack/tls/tls.crt
- --tls-key=/etc/tailpack/tls/tls.key
{{- end }}
{{- end }}

{{/* Of callers of routers, in this chart's own jobs. */}}
{{- define "tailpack.clientTlsArgs" -}}
{{- if include "tailpack.tls" . }}
- --tls-ca=/etc/tailpack/tls/ca.crt
{{- if .Values.tls.clientCertificates }}
- --tls-client-cert=/etc/tailpack/tls/tls.crt
- --tls-client-key=/etc/tailpack/tls/tls.key
{{- end }}
{{- end }}
{{- end }}

{{- define "tailpack.clientEnv" -}}
- name: HOME
  value: /tmp
{{- with .Values.tokens.clientSecret }}
- name: TAILPACK_TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ . | quote }}
      key: token
{{- end }}
{{- end }}

{{/* http or https, with the client certificate that doors under TLS demand. Argument: list of root, role and server name. */}}
{{- define "tailpack.scrapeTls" -}}
{{- $root := index . 0 -}}
{{- if include "tailpack.tls" $root }}
scheme: https
tlsConfig:
  serverName: {{ index . 1 }}
  ca:
    secret:
      name: {{ include "tailpack.tlsSecret" (list $root "client") | quote }}
      key: ca.crt
  cert:
    secret:
      name: {{ include "tailpack.tlsSecret" (list $root "client") | quote }}
      key: tls.crt
  keySecret:
    name: {{ include "tailpack.tlsSecret" (list $root "client") | quote }}
    key: tls.key
{{- else }}
scheme: http
{{- end }}
{{- end }}

{{/* The longest answer, 30 s that Ray's hook waits beyond it, 30 s that Ray then waits for actors, and the kvstore's end. */}}
{{- define "tailpack.workerGrace" -}}
{{- add (int .Values.longestStreamSeconds) 90 -}}
{{- end }}

{{- define "tailpack.routerGrace" -}}
{{- add (int .Values.longestStreamSeconds) (int .Values.routers.preStopSeconds) 30 -}}
{{- end }}

{{/* Argument: the values that may have extraEnv. */}}
{{- define "tailpack.extraEnv" -}}
{{- with .extraEnv }}{{ toYaml . }}{{ end -}}
{{- end }}

{{/* Number of workers in a pod of a group. */}}
{{- define "tailpack.workersPerPod" -}}
{{- if .gpus }}{{ int .gpus }}{{ else }}{{ int (.cpuWorkers | default 1) }}{{ end -}}
{{- end }}

{{/* As strings: a custom resource's schema knows no fractions, as cpu: 0.5. Argument: requests and limits. */}}
{{- define "tailpack.resources" -}}
{{- range $which, $amounts := pick . "requests" "limits" }}
{{ $which }}:
  {{- range $name, $amount := $amounts }}
  {{ $name }}: {{ toJson $amount | trimAll "\"" | quote }}
  {{- end }}
{{- end }}
{{- end }}

{{/* What a quantity says, as a number. Argument: the quantity. */}}
{{- define "tailpack.amount" -}}
{{- $text := toJson . | trimAll "\"" -}}
{{- $units := dict "" 1.0 "m" 0.001 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "Ki" 1024.0 "Mi" 1048576.0 "Gi" 1073741824.0 "Ti" 1099511627776.0 -}}
{{- mulf (regexFind "^[0-9.]+" $text | float64) (get $units (regexFind "[A-Za-z]*$" $text)) -}}
{{- end }}

{{/* The pods of this release and of no other, as a regular expression for Prometheus. KubeRay calls worker pods
CLUSTER-GROUP-worker-SUFFIX. */}}
{{- define "tailpack.podRegex" -}}
{{- $groups := list }}
{{- range .Values.workerGroups }}{{ $groups = append $groups .name }}{{ end -}}
{{- printf "%s-(router|(%s)-worker)-.+" (include "tailpack.fullname" .) (join "|" $groups) -}}
{{- end }}

{{/* The port at the end of an address; another where there is none. Argument: list of address and the other. */}}
{{- define "tailpack.portOf" -}}
{{- regexFind ":[0-9]+/?$" (index . 0) | trimAll ":/" | default (index . 1) -}}
{{- end }}

{{/* Workers that a pod of any group has at most. */}}
{{- define "tailpack.mostWorkersPerPod" -}}
{{- $most := 1 }}
{{- range .Values.workerGroups }}
{{- $most = max $most (int (include "tailpack.workersPerPod" (mustMergeOverwrite (deepCopy $.Values.workerDefaults) .))) }}
{{- end }}
{{- $most -}}
{{- end }}

{{- define "tailpack.groupService" -}}
{{- printf "%s-workers-%s" (include "tailpack.fullname" (index . 0)) (index . 1).name -}}
{{- end }}

{{- define "tailpack.rayEnv" -}}
- name: HOME
  value: /tmp
- name: RAY_USAGE_STATS_ENABLED
  value: "0"
{{- end }}

{{/* KubeRay sets these for Ray containers; ours beside them need them, too. */}}
{{- define "tailpack.rayAuthEnv" -}}
{{- if .Values.ray.auth.enabled }}
- name: RAY_AUTH_MODE
  value: token
- name: RAY_AUTH_TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ .Values.ray.auth.existingSecret | default (include "tailpack.fullname" .) | quote }}
      key: auth_token
{{- else }}
- name: RAY_AUTH_MODE
  value: disabled
{{- end }}
{{- end }}

{{/* Fixed ports, so that NetworkPolicies can name them. */}}
{{- define "tailpack.rayPortParams" -}}
{{- $p := include "tailpack.ports" . | fromYaml -}}
node-manager-port: {{ $p.rayNodeManager | quote }}
object-manager-port: {{ $p.rayObjectManager | quote }}
runtime-env-agent-port: {{ $p.rayRuntimeEnvAgent | quote }}
dashboard-agent-grpc-port: {{ $p.rayAgentGrpc | quote }}
dashboard-agent-listen-port: {{ $p.rayAgentHttp | quote }}
metrics-export-port: {{ $p.rayMetrics | quote }}
min-worker-port: {{ $p.rayWorkerFirst | quote }}
max-worker-port: {{ $p.rayWorkerLast | quote }}
object-store-memory: {{ mul .Values.ray.objectStoreMiB 1048576 | quote }}
disable-usage-stats: "true"
{{- end }}

{{- define "tailpack.tcpProbes" -}}
startupProbe:
  tcpSocket:
    port: {{ . }}
  periodSeconds: 5
  failureThreshold: 60
readinessProbe:
  tcpSocket:
    port: {{ . }}
  periodSeconds: 10
  failureThreshold: 3
livenessProbe:
  tcpSocket:
    port: {{ . }}
  periodSeconds: 10
  failureThreshold: 12
  terminationGracePeriodSeconds: 30 # what hangs does not drain
{{- end }}

{{/* Argument: list of port name, what the start waits for (live or ready), and seconds that it may take. */}}
{{- define "tailpack.httpProbes" -}}
startupProbe:
  httpGet:
    path: /health/{{ index . 1 }}
    port: {{ index . 0 }}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: {{ div (add (int (index . 2)) 4) 5 }}
readinessProbe:
  httpGet:
    path: /health/ready
    port: {{ index . 0 }}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: 3
livenessProbe:
  httpGet:
    path: /health/live
    port: {{ index . 0 }}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
  terminationGracePeriodSeconds: 30 # what hangs does not drain
{{- end }}

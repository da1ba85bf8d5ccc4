{{/* The pod of a worker group. Arguments: root, the group with its defaults, workers in a pod.

One process namespace: the kvstore watches over the exit of a worker that lost its attachment, before it gives the memory
to the next. Order: the kvstore is up before Ray starts, and stays until all else has ended. */}}
{{- define "tailpack.workerPod" -}}
{{- $root := index . 0 -}}
{{- $group := index . 1 -}}
{{- $perPod := index . 2 -}}
{{- $p := include "tailpack.ports" $root | fromYaml -}}
{{- $onGpu := gt (int $group.gpus) 0 -}}
{{- $image := include "tailpack.image" (list $root (ternary "gpu" "cpu" $onGpu)) -}}
{{- $arenaMiB := $onGpu | ternary 0 (mul $perPod (int $group.kvMiB)) -}}
{{ include "tailpack.pod" $root }}
{{- with $group.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
shareProcessNamespace: true
terminationGracePeriodSeconds: {{ include "tailpack.workerGrace" $root }}
{{- include "tailpack.lines" (list (include "tailpack.placement" $group) 0) }}
initContainers:
  - name: kvstore
    restartPolicy: Always # a native sidecar
    image: {{ $image }}
    imagePullPolicy: {{ $root.Values.image.pullPolicy }}
    command:
      - tailpack
      - kvstore
      - serve
      - --socket-dir=/run/tailpack/kv
      - --metrics=0.0.0.0:{{ $p.kvstoreMetrics }}
      - --health=0.0.0.0:{{ $p.kvstoreHealth }}
      - --orphan-timeout={{ int $group.startupSeconds }} # sequences wait for the next worker, which loads the model first
      {{- include "tailpack.lines" (list (include "tailpack.serverTlsArgs" $root) 6) }}
      {{- if include "tailpack.tls" $root }}
      - --tls-client-ca=/etc/tailpack/tls/ca.crt
      {{- end }}
      - --log-json
    env:
      - name: HOME
        value: /tmp
      {{- include "tailpack.lines" (list (include "tailpack.extraEnv" $group) 6) }}
    ports:
      - name: kv-metrics
        containerPort: {{ $p.kvstoreMetrics }}
      - name: kv-health
        containerPort: {{ $p.kvstoreHealth }}
    {{- include "tailpack.httpProbes" (list "kv-health" "ready" 120) | nindent 4 }}
    resources:
      requests:
        cpu: {{ toJson $group.kvstore.cpu | trimAll "\"" | quote }}
        memory: {{ add (int $group.kvstore.baseMiB) $arenaMiB }}Mi
      limits: # arenas in host memory are charged to who made them, and that is the kvstore
        memory: {{ add (int $group.kvstore.baseMiB) $arenaMiB }}Mi
    securityContext:
      {{- include "tailpack.securityContext" $root | nindent 6 }}
    volumeMounts:
      {{- include "tailpack.workerMounts" $root | nindent 6 }}
containers:
  - name: ray-worker
    image: {{ $image }}
    imagePullPolicy: {{ $root.Values.image.pullPolicy }}
    env:
      {{- include "tailpack.rayEnv" $root | nindent 6 }}
      {{- if not $root.Values.ray.auth.enabled }}
      - name: RAY_AUTH_MODE
        value: disabled
      {{- end }}
      {{- include "tailpack.lines" (list (include "tailpack.extraEnv" $group) 6) }}
    ports:
      - name: node-manager
        containerPort: {{ $p.rayNodeManager }}
      - name: metrics
        containerPort: {{ $p.rayMetrics }}
      {{- range until $perPod }}
      - name: grpc-{{ . }}
        containerPort: {{ add $p.worker . }}
      - name: metrics-{{ . }}
        containerPort: {{ add $p.workerMetrics . }}
      {{- end }}
    {{- include "tailpack.tcpProbes" "node-manager" | nindent 4 }}
    lifecycle:
      preStop: # Ray, and with it the workers, must not end before these have drained; they may not have been told yet
        exec:
          command:
            - /bin/sh
            - -c
            - touch /run/tailpack/drain; n=0; until [ -e /run/tailpack/drained ] || [ $n -ge {{ add (int $root.Values.longestStreamSeconds) 30 }} ]; do sleep 1; n=$((n + 1)); done
    resources:
      {{- $resources := deepCopy $group.resources }}
      {{- if $onGpu }}
      {{- $_ := set $resources.requests $group.gpuResource (int $group.gpus) }}
      {{- $_ := set $resources.limits $group.gpuResource (int $group.gpus) }}
      {{- end }}
      {{- include "tailpack.resources" $resources | trim | nindent 6 }}
    securityContext:
      {{- include "tailpack.securityContext" $root | nindent 6 }}
    volumeMounts:
      {{- include "tailpack.workerMounts" $root | nindent 6 }}
  - name: workers
    image: {{ $image }}
    imagePullPolicy: {{ $root.Values.image.pullPolicy }}
    command:
      - tailpack
      - worker
      - node
      - --ray-address=auto
      - {{ include "tailpack.modelPath" $root | printf "--model=%s" | quote }}
      - {{ include "tailpack.modelName" $root | printf "--name=%s" | quote }}
      - --kv-socket=/run/tailpack/kv/kvstore.sock
      - --listen=0.0.0.0:{{ $p.worker }}
      - --metrics=0.0.0.0:{{ $p.workerMetrics }}
      - --health=0.0.0.0:{{ $p.workersHealth }}
      - --log-dir=/run/tailpack/logs
      - --drain-file=/run/tailpack/drain
      - --drained-file=/run/tailpack/drained
      - --node-name=$(POD_NAME)
      - --device={{ ternary "cuda" "cpu" $onGpu }}
      - --workers={{ $perPod }}
      - --arena-bytes={{ int $group.kvMiB }}M
      - --kv-mode={{ $group.kvMode }}
      {{- with $group.kvPreset }}
      - --kv-preset={{ . }}
      {{- end }}
      - --dense-layers={{ $group.denseLayers }}
      - --max-running={{ int $group.maxRunning }}
      {{- with int $group.maxSequenceTokens }}
      - --max-sequence-tokens={{ . }}
      {{- end }}
      {{- if $group.deterministic }}
      - --deterministic
      {{- end }}
      {{- if $group.decodeGraphs }}
      - --decode-graphs
      {{- end }}
      - --step-time-budget-ms={{ int $group.stepTimeBudgetMs }}
      {{- if $group.standby }}
      - --standby
      {{- end }}
      {{- if not $group.weightsArena }}
      - --no-weights-arena
      {{- end }}
      - --drain-s={{ int $root.Values.longestStreamSeconds }}
      {{- include "tailpack.lines" (list (include "tailpack.serverTlsArgs" $root) 6) }}
      {{- if include "tailpack.tls" $root }}
      - --tls-client-ca=/etc/tailpack/tls/ca.crt
      {{- end }}
      - --otlp-endpoint={{ $root.Values.tracing.otlpEndpoint | default "none" }}
      - --log-json
      {{- with $group.extraArgs }}
      {{- toYaml . | nindent 6 }}
      {{- end }}
    env:
      {{- include "tailpack.rayEnv" $root | nindent 6 }}
      {{- include "tailpack.lines" (list (include "tailpack.rayAuthEnv" $root) 6) }}
      {{- if $root.Values.ray.gcsFaultTolerance.enabled }}
      - name: RAY_gcs_rpc_server_reconnect_timeout_s # as KubeRay sets it for Ray's own container
        value: "600"
      {{- end }}
      - name: POD_NAME
        valueFrom:
          fieldRef:
            fieldPath: metadata.name
      {{- include "tailpack.lines" (list (include "tailpack.extraEnv" $group) 6) }}
    ports:
      - name: health
        containerPort: {{ $p.workersHealth }}
    {{- include "tailpack.httpProbes" (list "health" "ready" (int $group.startupSeconds)) | nindent 4 }}
    resources:
      requests:
        cpu: 100m
        memory: 512Mi
      limits:
        memory: 1Gi
    securityContext:
      {{- include "tailpack.securityContext" $root | nindent 6 }}
    volumeMounts:
      {{- include "tailpack.workerMounts" $root | nindent 6 }}
volumes:
  - name: run
    emptyDir:
      sizeLimit: 1Gi
  - name: tmp # Ray's session, which containers share
    emptyDir:
      sizeLimit: 16Gi
  - name: shared-mem
    emptyDir:
      medium: Memory
      sizeLimit: {{ add $root.Values.ray.objectStoreMiB 128 }}Mi
  {{- include "tailpack.lines" (list (include "tailpack.modelVolume" $root) 2) }}
  {{- include "tailpack.lines" (list (include "tailpack.tlsVolume" (list $root "worker")) 2) }}
{{- end }}

{{- define "tailpack.workerMounts" -}}
- name: run
  mountPath: /run/tailpack
- name: tmp
  mountPath: /tmp
- name: shared-mem
  mountPath: /dev/shm
{{- include "tailpack.lines" (list (include "tailpack.modelMount" .) 0) }}
{{- include "tailpack.lines" (list (include "tailpack.tlsMount" .) 0) }}
{{- end }}

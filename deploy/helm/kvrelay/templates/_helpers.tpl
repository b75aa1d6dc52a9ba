{{- define "kvrelay.name" -}}
kvrelay-{{ .Values.spec.name }}
{{- end }}

{{- define "kvrelay.labels" -}}
app.kubernetes.io/part-of: kvrelay
app.kubernetes.io/instance: {{ include "kvrelay.name" . }}
{{- end }}

{{- /* Of (root, suffix of the name). */}}
{{- define "kvrelay.metadata" -}}
{{- $root := index . 0 -}}
name: {{ include "kvrelay.name" $root }}{{ index . 1 }}
{{- with $root.Values.spec.deploy.namespace }}
namespace: {{ . }}
{{- end }}
labels:
  {{- include "kvrelay.labels" $root | nindent 2 }}
{{- end }}

{{- /* Bytes of a number, or of a number with a binary unit. */}}
{{- define "kvrelay.bytes" -}}
{{- $text := kindIs "string" . | ternary . (printf "%d" (int64 .)) -}}
{{- $units := dict "" 1 "KiB" 1024 "MiB" 1048576 "GiB" 1073741824 "TiB" 1099511627776 -}}
{{- $unit := regexFind "[A-Za-z]*$" $text -}}
{{- if not (hasKey $units $unit) }}{{ fail (printf "sizes are bytes or have a binary unit as in 512MiB, got %s" $text) }}{{ end -}}
{{- mul (regexFind "^[0-9]+" $text | int64) (get $units $unit | int64) -}}
{{- end }}

{{- define "kvrelay.mebibytes" -}}
{{ div (add . 1048575) 1048576 }}Mi
{{- end }}

{{- define "kvrelay.httpPort" -}}
{{- $router := .Values.spec.router -}}
{{- kindIs "invalid" $router.http_port | ternary (add $router.port 1) $router.http_port | int -}}
{{- end }}

{{- define "kvrelay.stopBound" -}}
{{- $limits := .Values.spec.supervision -}}
{{- addf (mulf 2 (addf $limits.drain_s $limits.stop_timeout_s)) 20 | ceil | int -}}
{{- end }}

{{- define "kvrelay.drainBound" -}}
{{- $limits := .Values.spec.supervision -}}
{{- addf $limits.worker_drain_s $limits.stop_timeout_s | ceil | int -}}
{{- end }}

{{- /* The spec as the supervisor's pod gets it. */}}
{{- define "kvrelay.spec" -}}
{{- $spec := deepCopy .Values.spec -}}
{{- $port := include "kvrelay.httpPort" . | int -}}
{{- if or (not $spec.router.port) (not $port) }}{{ fail "spec.router.port and http_port must be given for Kubernetes" }}{{ end -}}
{{- $_ := mergeOverwrite $spec.router (dict "host" "0.0.0.0" "api_keys" "/etc/kvrelay/api-keys/api-keys.yaml" "ray_resource" "kvrelay_router") -}}
{{- if $spec.router.public_prefixes }}{{ $_ := set $spec.router "public_prefixes" "/etc/kvrelay/spec/public-prefixes.yaml" }}{{ end -}}
{{- if $spec.router.tls_cert }}{{ $_ := mergeOverwrite $spec.router (dict "tls_cert" "/etc/kvrelay/tls/tls.crt" "tls_key" "/etc/kvrelay/tls/tls.key") }}{{ end -}}
{{- if $spec.router.tls_client_ca }}{{ $_ := set $spec.router "tls_client_ca" "/etc/kvrelay/tls/ca.crt" }}{{ end -}}
{{- range $role := list "prefill" "decode" -}}
{{- $_ := mergeOverwrite (get $spec.pools $role) (dict "host" "node" "ray_labels" "" "ray_resource" (printf "kvrelay_%s" $role)) -}}
{{- end -}}
{{- $_ := set $spec "ray" (dict "address" "127.0.0.1:6379" "object_store_bytes" .Values.spec.ray.object_store_bytes) -}}
{{- toYaml $spec -}}
{{- end }}

{{- /* Of (root, name, bytes, cpu, gpus). */}}
{{- define "kvrelay.container" -}}
{{- $deploy := (index . 0).Values.spec.deploy -}}
{{- $memory := include "kvrelay.mebibytes" (index . 2) -}}
{{- $gpus := int (index . 4) -}}
name: {{ index . 1 }}
image: {{ $deploy.image | quote }}
imagePullPolicy: {{ $deploy.image_pull_policy }}
resources:
  requests:
    cpu: {{ index . 3 | toString | quote }}
    memory: {{ $memory }}
    {{- if $gpus }}
    nvidia.com/gpu: {{ $gpus | quote }}
    {{- end }}
  limits:
    memory: {{ $memory }}
    {{- if $gpus }}
    nvidia.com/gpu: {{ $gpus | quote }}
    {{- end }}
securityContext:
  allowPrivilegeEscalation: false
  capabilities:
    drop: [ALL]
{{- end }}

{{- define "kvrelay.env" -}}
- {name: KVRELAY_HOME, value: /var/lib/kvrelay}
- {name: RAY_USAGE_STATS_ENABLED, value: "0"}
{{- end }}

{{- define "kvrelay.rayEnv" -}}
{{ include "kvrelay.env" . }}
- {name: RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S, value: {{ . | quote }}}
- {name: RAY_worker_niceness, value: "0"}
- {name: TORCH_NCCL_ASYNC_ERROR_HANDLING, value: "0"}
- {name: RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO, value: "0"}
{{- end }}

{{- define "kvrelay.modelMount" -}}
{{- if .Values.spec.deploy.model_claim }}
- {name: models, mountPath: /models, readOnly: true}
{{- end }}
{{- end }}

{{- define "kvrelay.modelVolume" -}}
{{- with .Values.spec.deploy.model_claim }}
- name: models
  persistentVolumeClaim: {claimName: {{ . }}, readOnly: true}
{{- end }}
{{- end }}

{{- /* Of (root, seconds to end in). */}}
{{- define "kvrelay.pod" -}}
{{- $root := index . 0 -}}
terminationGracePeriodSeconds: {{ index . 1 }}
automountServiceAccountToken: false
securityContext:
  runAsNonRoot: true
  runAsUser: 1000
  runAsGroup: 1000
  fsGroup: 1000
  seccompProfile: {type: RuntimeDefault}
{{- if not $root.Values.spec.deploy.model_claim }}
initContainers:
- {{- include "kvrelay.container" (list $root "model" 2147483648 "250m" 0) | nindent 2 }}
  command: [kvrelay, pull, {{ $root.Values.spec.model | quote }}]
  env:
  {{- include "kvrelay.env" $root | nindent 2 }}
  volumeMounts:
  - {name: home, mountPath: /var/lib/kvrelay}
{{- end }}
{{- end }}

{{- /* Prefix of a release's names: heterotrain for release "heterotrain", team-a-heterotrain for "team-a". */}}
{{- define "heterotrain.release" -}}
{{- $release := trimSuffix "-operator" .Release.Name -}}
{{- $name := .Values.nameOverride | default "heterotrain" -}}
{{- if not (contains $name $release) -}}{{ $release = printf "%s-%s" ($release | trunc (int (sub 53 (len $name))) | trimSuffix "-") $name }}{{- end -}}
{{- .Values.fullnameOverride | default $release -}}
{{- end -}}

{{- define "heterotrain.name" -}}{{ include "heterotrain.release" . }}-operator{{- end -}}

{{- /* Name for objects outside the release's namespace; unique among releases of all namespaces. */}}
{{- define "heterotrain.clusterName" -}}{{ include "heterotrain.name" . }}-{{ .Release.Namespace }}{{- end -}}

{{- define "heterotrain.labels" -}}
app.kubernetes.io/name: heterotrain-operator
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/part-of: heterotrain
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- with omit .Values.commonLabels "app.kubernetes.io/name" "app.kubernetes.io/instance" "app.kubernetes.io/version" "app.kubernetes.io/part-of" "app.kubernetes.io/managed-by" "helm.sh/chart" }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- /*
Field "annotations" of an object, or nothing: (list $ own…), where later mappings win. It starts with the line break
before the field, so that an object without annotations has no empty line.
*/}}
{{- define "heterotrain.annotations" -}}
{{- $all := dict -}}
{{- range rest . }}{{ $all = merge $all (. | default dict) }}{{ end -}}
{{- $all = merge $all (first .).Values.commonAnnotations -}}
{{- with $all }}
  annotations: {{- toYaml . | nindent 4 }}
{{- end }}
{{- end -}}

{{- define "heterotrain.selector" -}}
app.kubernetes.io/name: heterotrain-operator
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "heterotrain.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}{{ .Values.serviceAccount.name | default (include "heterotrain.name" .) }}
{{- else -}}{{ required "serviceAccount.name is needed when serviceAccount.create is false" .Values.serviceAccount.name }}
{{- end -}}
{{- end -}}

{{- define "heterotrain.image" -}}
{{- with .Values.image.registry | default (.Values.global | default dict).imageRegistry }}{{ . }}/{{ end -}}
{{- if .Values.image.digest -}}{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else -}}{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}
{{- end -}}

{{- /* Own pull secrets and those of all charts of an umbrella, by name or as references; nothing without any. */}}
{{- define "heterotrain.pullSecrets" -}}
{{- $all := .Values.imagePullSecrets -}}
{{- range (.Values.global | default dict).imagePullSecrets }}
{{- $all = append $all (ternary (dict "name" .) . (kindIs "string" .)) -}}
{{- end -}}
{{- with $all }}{{ toYaml (uniq .) }}{{ end -}}
{{- end -}}

{{/* How the operator, and the pod of `helm test`, reach Prometheus: variables, mounts and volumes. */}}
{{- define "heterotrain.prometheusEnv" -}}
- {name: HETEROTRAIN_OPERATOR_PROMETHEUS_URL, value: {{ .Values.prometheus.url | quote }}}
{{- if .Values.prometheus.auth.secretName }}
- {name: HETEROTRAIN_OPERATOR_PROMETHEUS_AUTH_DIR, value: /etc/heterotrain/prometheus-auth}
{{- end }}
{{- if .Values.prometheus.auth.caSecretName }}
- {name: HETEROTRAIN_OPERATOR_PROMETHEUS_CA_FILE, value: /etc/heterotrain/prometheus-ca/ca.crt}
{{- end }}
{{- end }}

{{- define "heterotrain.prometheusMounts" -}}
{{- if .Values.prometheus.auth.secretName }}
- {name: prometheus-auth, mountPath: /etc/heterotrain/prometheus-auth, readOnly: true}
{{- end }}
{{- if .Values.prometheus.auth.caSecretName }}
- {name: prometheus-ca, mountPath: /etc/heterotrain/prometheus-ca, readOnly: true}
{{- end }}
{{- end }}

{{- define "heterotrain.prometheusVolumes" -}}
{{- with .Values.prometheus.auth.secretName }}
- {name: prometheus-auth, secret: {secretName: {{ . }}}}
{{- end }}
{{- with .Values.prometheus.auth.caSecretName }}
- {name: prometheus-ca, secret: {secretName: {{ . }}}}
{{- end }}
{{- end }}

{{- /* Where an alert is explained: (list $ anchor). */}}
{{- define "heterotrain.runbook" -}}
runbook: docs/operations.md#{{ last . }}
{{- with (first .).Values.monitoring.prometheusRule.runbookUrl }}
runbook_url: {{ . }}#{{ last $ }}
{{- end }}
{{- end -}}

{{- /* How a monitor scrapes: (list name values). A scrape that may take longer than the interval is refused by Prometheus. */}}
{{- define "heterotrain.scrape" -}}
{{- $own := last . -}}
interval: {{ $own.interval }}
{{- with $own.scrapeTimeout }}
{{- if gt (int64 (include "heterotrain.milliseconds" .)) (int64 (include "heterotrain.milliseconds" $own.interval)) }}
{{- fail (printf "monitoring.%s.scrapeTimeout is %s, longer than the interval of %s: lower it" (first $) . $own.interval) }}
{{- end }}
scrapeTimeout: {{ . }}
{{- end }}
{{- with $own.metricRelabelings }}
metricRelabelings: {{- toYaml . | nindent 0 }}
{{- end }}
{{- end -}}

{{- define "heterotrain.milliseconds" -}}
{{- mul (regexFind "^[0-9]+" . | int64) (get (dict "ms" 1 "s" 1000 "m" 60000) (regexFind "[a-z]+$" .)) -}}
{{- end -}}

{{- /* The limit of the operator's memory in bytes; nothing without a limit. */}}
{{- define "heterotrain.memoryLimit" -}}
{{- with (.Values.resources.limits | default dict).memory -}}
{{- $text := ternary (printf "%.0f" .) (toString .) (kindIs "float64" .) -}}
{{- $suffix := regexFind "[a-zA-Z]*$" $text -}}
{{- $base := ternary 1024.0 1000.0 (hasSuffix "i" $suffix) -}}
{{- $bytes := float64 (regexFind "^[0-9.]+" $text) -}}
{{- range until (get (dict "k" 1 "K" 1 "M" 2 "G" 3 "T" 4 "P" 5 "E" 6) (trimSuffix "i" $suffix) | default 0) }}{{ $bytes = mulf $bytes $base }}{{ end -}}
{{- int64 $bytes -}}
{{- end -}}
{{- end -}}

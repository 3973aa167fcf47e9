{{- define "everstep.labels" -}}
app.kubernetes.io/name: everstep
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{- define "everstep.metadata" -}}
{{- if or (gt (len .root.Release.Name) 39) (contains "." .root.Release.Name) }}
  {{- fail (printf "the release name %q: at most 39 characters and no dots, as names of services and pods contain it" .root.Release.Name) }}
{{- end -}}
name: {{ .root.Release.Name }}-{{ .component }}
namespace: {{ .root.Release.Namespace }}
labels:
  {{- include "everstep.labels" . | nindent 2 }}
{{- end -}}

{{- define "everstep.busUrl" -}}
{{ .Values.bus.url | default (printf "nats://%s-bus.%s:4222" .Release.Name .Release.Namespace) }}
{{- end -}}

{{- define "everstep.podSecurity" -}}
runAsNonRoot: true
runAsUser: {{ .Values.user }}
runAsGroup: {{ .Values.user }}
fsGroup: {{ .Values.user }}
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{- define "everstep.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{/* Where pods run: replicas of one component on different nodes, if there are enough. */}}
{{- define "everstep.placement" -}}
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "everstep.labels" . | nindent 8 }}
{{- with .root.Values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .root.Values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .root.Values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "everstep.resources" -}}
resources:
  requests:
    cpu: {{ .cpu | quote }}
    memory: {{ .memory | quote }}
  limits:
    memory: {{ .memory | quote }}
{{- end -}}

{{/* The environment that all services share. Secrets are files; their paths are here. */}}
{{- define "everstep.environment" -}}
- name: EVERSTEP_BUS__URL
  value: {{ include "everstep.busUrl" .root | quote }}
- name: EVERSTEP_BUS__CREDENTIALS_FILE
  value: /run/everstep/service/bus.creds
- name: EVERSTEP_BUS__RENEWED_CREDENTIALS_FILE
  value: /var/lib/everstep/bus.creds
- name: EVERSTEP_BUS__SPOOL_DIR
  value: /var/lib/everstep/spool
- name: EVERSTEP_BUS__REPLICAS
  value: {{ .root.Values.bus.copies | quote }}
{{- if .root.Values.bus.caSecret }}
- name: EVERSTEP_BUS__CA_FILE
  value: /run/everstep/ca/ca.pem
{{- end }}
- name: EVERSTEP_OBSERVE__HOST
  value: 0.0.0.0
{{- end -}}

{{- define "everstep.probes" -}}
startupProbe: # its process is up
  httpGet: {path: /livez, port: metrics}
  periodSeconds: 2
  failureThreshold: 60
livenessProbe: # its loop runs. Without the bus it lives on, and is not restarted for that.
  httpGet: {path: /livez, port: metrics}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
readinessProbe: # it reaches what it needs
  httpGet: {path: /healthz, port: metrics}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 3
{{- end -}}

{{- define "everstep.mounts" -}}
- {name: state, mountPath: /var/lib/everstep}
- {name: tmp, mountPath: /tmp}
- {name: service, mountPath: /run/everstep/service, readOnly: true}
{{- if .root.Values.bus.caSecret }}
- {name: ca, mountPath: /run/everstep/ca, readOnly: true}
{{- end }}
{{- end -}}

{{- define "everstep.volumes" -}}
- name: tmp
  emptyDir: {sizeLimit: 64Mi}
- name: service
  secret:
    secretName: {{ .root.Values.serviceSecret }}
    defaultMode: 0440
{{- with .root.Values.bus.caSecret }}
- name: ca
  secret:
    secretName: {{ . }}
    defaultMode: 0440
{{- end }}
{{- end -}}

{{- define "everstep.claim" -}}
volumeClaimTemplates:
  - metadata:
      name: {{ .name }}
    spec:
      accessModes: [ReadWriteOnce]
      {{- with .class }}
      storageClassName: {{ . }}
      {{- end }}
      resources:
        requests:
          storage: {{ .storage | quote }}
{{- end -}}

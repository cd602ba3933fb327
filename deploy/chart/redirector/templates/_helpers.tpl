{{/* Name of everything. */}}
{{- define "redirector.name" -}}
{{- .Values.nameOverride | default "redirector" -}}
{{- end }}

{{/* The labels by which the DaemonSet knows its pods: they can never change. */}}
{{- define "redirector.selectorLabels" -}}
app.kubernetes.io/name: {{ include "redirector.name" . }}
app.kubernetes.io/component: agent
{{- end }}

{{- define "redirector.labels" -}}
{{ include "redirector.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/part-of: redirector
{{- end }}

{{/* The backend. */}}
{{- define "redirector.redirect" -}}
{{- .Values.redirect | default (ternary "none" "ebpf" (eq .Values.pods "zds")) -}}
{{- end }}

{{/* Which image: iptables' programs are in one of their own. */}}
{{- define "redirector.tag" -}}
{{- $own := ternary "-iptables" "" (eq (include "redirector.redirect" .) "iptables") -}}
{{- .Values.image.tag | default (printf "%s%s" .Chart.AppVersion $own) -}}
{{- end }}

{{/* Whether the agent asks the Kubernetes API. */}}
{{- define "redirector.asksKubernetes" -}}
{{- if or (eq .Values.pods "cni") (include "redirector.signs" .) }}true{{ end -}}
{{- end }}

{{/* Whether the agent itself carries connections, and so needs mesh and certificates. */}}
{{- define "redirector.carries" -}}
{{- if eq .Values.proxy "redirector" }}true{{ end -}}
{{- end }}

{{- define "redirector.signs" -}}
{{- if and (include "redirector.carries" .) (eq .Values.certificates.source "signer") }}true{{ end -}}
{{- end }}

{{/* Address of the authority; empty where certificates are from elsewhere. */}}
{{- define "redirector.caAddress" -}}
{{- if and (include "redirector.carries" .) (eq .Values.certificates.source "istio") -}}
{{- .Values.certificates.address | default .Values.controlPlane.xdsAddress -}}
{{- end -}}
{{- end }}

{{- define "redirector.xdsAddress" -}}
{{- if include "redirector.carries" . }}{{ .Values.controlPlane.xdsAddress }}{{ end -}}
{{- end }}

{{/* What a schema cannot say: settings that contradict each other. */}}
{{- define "redirector.check" -}}
{{- if and (eq .Values.pods "zds") (eq .Values.proxy "ztunnel") }}
{{- fail "pods: zds and proxy: ztunnel: nothing is left for this agent to do; change one of them" }}
{{- end }}
{{- if and (eq .Values.pods "zds") (ne (include "redirector.redirect" .) "none") }}
{{- fail "pods: zds: istio-cni redirects by its own rules, so redirect must be none, or empty" }}
{{- end }}
{{- if and (eq .Values.pods "cni") (eq (include "redirector.redirect" .) "none") }}
{{- fail "redirect: none: with pods: cni nobody would redirect; give ebpf or iptables" }}
{{- end }}
{{- if eq .Values.proxy "ztunnel" }}
{{- if ne (include "redirector.redirect" .) "ebpf" }}
{{- fail "proxy: ztunnel: redirection is by eBPF only; leave redirect empty" }}
{{- end }}
{{- if or .Values.strict .Values.sameNodeDirect .Values.workloads }}
{{- fail "proxy: ztunnel: strict, sameNodeDirect and workloads are for this agent's own proxy; leave them out" }}
{{- end }}
{{- else }}
{{- $certificates := .Values.certificates }}
{{- if and (eq $certificates.source "istio") (not (include "redirector.caAddress" .)) }}
{{- fail "certificates.source: istio: needs certificates.address, or controlPlane.xdsAddress; choose another source where there is no Istio" }}
{{- end }}
{{- if and (eq $certificates.source "signer") (or (not $certificates.signer.name) (not $certificates.signer.rootConfigMap)) }}
{{- fail "certificates.source: signer: needs certificates.signer.name and certificates.signer.rootConfigMap" }}
{{- end }}
{{- if and (eq $certificates.source "files") (not $certificates.files.volume) }}
{{- fail "certificates.source: files: needs certificates.files.volume" }}
{{- end }}
{{- end }}
{{- end }}

{{/* The agent's configuration file. */}}
{{- define "redirector.config" -}}
{{- include "redirector.check" . }}
{{- $redirect := include "redirector.redirect" . }}
{{- $config := dict "redirect" $redirect "log-level" .Values.logging.level "log-format" .Values.logging.format }}
{{- if eq .Values.pods "cni" }}
{{- $_ := set $config "kubernetes-pods" true }}
{{- $_ := set $config "daemonset" (include "redirector.name" .) }}
{{- with .Values.enrolment.selectors }}
{{- $_ := set $config "enablement-selectors" (toYaml .) }}
{{- end }}
{{- with .Values.enrolment.excludeNamespaces }}
{{- $_ := set $config "exclude-namespaces" (join "," .) }}
{{- end }}
{{- $_ := set $config "status-annotation" .Values.enrolment.statusAnnotation }}
{{- if .Values.cni.install }}
{{- $_ := set $config "cni-install" true }}
{{- $_ := set $config "cni-conf-dir" .Values.cni.confDir }}
{{- $_ := set $config "cni-bin-dir" .Values.cni.binDir }}
{{- $_ := set $config "cni-chained" .Values.cni.chained }}
{{- with .Values.cni.confName }}
{{- $_ := set $config "cni-conf-name" . }}
{{- end }}
{{- if .Values.cni.ownedConfig }}
{{- $_ := set $config "cni-owned-config" true }}
{{- end }}
{{- with .Values.cni.ownedConfigFilename }}
{{- $_ := set $config "cni-owned-config-filename" . }}
{{- end }}
{{- end }}
{{- else }}
{{- $_ := set $config "inpod-uds" (printf "%s/ztunnel.sock" .Values.ztunnel.socketDir) }}
{{- end }}
{{- if eq .Values.proxy "ztunnel" }}
{{- $_ := set $config "ztunnel-uds" (printf "%s/ztunnel.sock" .Values.ztunnel.socketDir) }}
{{- else }}
{{- $plane := .Values.controlPlane }}
{{- $_ := set $config "cluster-id" $plane.clusterId }}
{{- $_ := set $config "trust-domain" $plane.trustDomain }}
{{- with $plane.trustDomainAliases }}
{{- $_ := set $config "trust-domain-alias" . }}
{{- end }}
{{- with $plane.network }}
{{- $_ := set $config "network" . }}
{{- end }}
{{- with include "redirector.xdsAddress" . }}
{{- $_ := set $config "xds-address" . }}
{{- $_ := set $config "xds-root-ca" "/var/run/secrets/istio/root-cert.pem" }}
{{- $_ := set $config "xds-on-demand" $plane.onDemand }}
{{- end }}
{{- with include "redirector.caAddress" . }}
{{- $_ := set $config "ca-address" . }}
{{- $_ := set $config "ca-root-ca" "/var/run/secrets/istio/root-cert.pem" }}
{{- end }}
{{- if or (include "redirector.xdsAddress" .) (include "redirector.caAddress" .) }}
{{- $_ := set $config "auth-token" "/var/run/secrets/tokens/istio-token" }}
{{- end }}
{{- $certificates := .Values.certificates }}
{{- with $certificates.lifetime }}
{{- $_ := set $config "svid-ttl" . }}
{{- end }}
{{- if eq $certificates.source "signer" }}
{{- $_ := set $config "kubernetes-signer" $certificates.signer.name }}
{{- $_ := set $config "kubernetes-signer-roots" (printf "/etc/redirector/signer/%s" $certificates.signer.rootKey) }}
{{- $_ := set $config "kubernetes-signer-approve" $certificates.signer.approve }}
{{- else if eq $certificates.source "files" }}
{{- $_ := set $config "cert-dir" "/etc/redirector/certificates" }}
{{- else if eq $certificates.source "spiffe" }}
{{- $_ := set $config "spiffe-socket" (printf "unix://%s/%s" $certificates.spiffe.directory $certificates.spiffe.socket) }}
{{- else if eq $certificates.source "development" }}
{{- $_ := set $config "fake-ca" true }}
{{- end }}
{{- if $certificates.revocations.configMap }}
{{- $_ := set $config "crl-file" (printf "/etc/redirector/revocations/%s" $certificates.revocations.key) }}
{{- end }}
{{- if .Values.strict }}
{{- $_ := set $config "strict" true }}
{{- end }}
{{- if .Values.sameNodeDirect }}
{{- $_ := set $config "same-node-direct" true }}
{{- end }}
{{- if .Values.workloads }}
{{- $_ := set $config "workloads" "/etc/redirector/config/workloads.yaml" }}
{{- end }}
{{- end }}
{{- if .Values.rules }}
{{- $_ := set $config "rules" "/etc/redirector/config/rules.yaml" }}
{{- end }}
{{- /* One by one: merging takes false for nothing. */}}
{{- range $name, $value := .Values.settings }}
{{- $_ := set $config $name $value }}
{{- end }}
{{- toYaml $config }}
{{- end }}

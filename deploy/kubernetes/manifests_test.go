// Package kubernetes_test checks manifests, dashboard and compose file. It is a module of its own, so that Kubernetes'
// types and Prometheus' parser are nobody's dependencies.
package kubernetes_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	monitoring "github.com/prometheus-operator/prometheus-operator/pkg/apis/monitoring/v1"
	"github.com/stretchr/testify/require"
	apps "k8s.io/api/apps/v1"
	batch "k8s.io/api/batch/v1"
	core "k8s.io/api/core/v1"
	networking "k8s.io/api/networking/v1"
	"sigs.k8s.io/kustomize/api/krusty"
	"sigs.k8s.io/kustomize/api/types"
	"sigs.k8s.io/kustomize/kyaml/filesys"
	"sigs.k8s.io/yaml"
)

type manifests struct {
	job         batch.Job
	deployments []apps.Deployment
	services    []core.Service
	configs     []core.ConfigMap
	namespaces  []core.Namespace
	policies    []networking.NetworkPolicy
	monitors    []monitoring.PodMonitor
}

// build renders a directory as kubectl does. Unknown fields are errors.
func build(t *testing.T, dir string) *manifests {
	t.Helper()
	resources, err := krusty.MakeKustomizer(krusty.MakeDefaultOptions()).Run(filesys.MakeFsOnDisk(), dir)
	require.NoError(t, err)
	m := &manifests{}
	for _, r := range resources.Resources() {
		b, err := r.AsYAML()
		require.NoError(t, err)
		switch kind := r.GetKind(); kind {
		case "Job":
			err = yaml.UnmarshalStrict(b, &m.job)
		case "Deployment":
			m.deployments, err = appendTo(m.deployments, b)
		case "Service":
			m.services, err = appendTo(m.services, b)
		case "ConfigMap":
			m.configs, err = appendTo(m.configs, b)
		case "Namespace":
			m.namespaces, err = appendTo(m.namespaces, b)
		case "NetworkPolicy":
			m.policies, err = appendTo(m.policies, b)
		case "PodMonitor":
			m.monitors, err = appendTo(m.monitors, b)
		default:
			t.Fatalf("a %s: this test doesn't know its type", kind)
		}
		require.NoError(t, err, "%s %s", r.GetKind(), r.GetName())
	}
	return m
}

func appendTo[T any](all []T, b []byte) ([]T, error) {
	var one T
	err := yaml.UnmarshalStrict(b, &one)
	return append(all, one), err
}

// TestSources: every file is used, and has no unknown fields or repeated keys, which kustomize would drop.
func TestSources(t *testing.T) {
	for _, dir := range []string{".", "podmonitor"} {
		b, err := os.ReadFile(filepath.Join(dir, "kustomization.yaml"))
		require.NoError(t, err)
		var k types.Kustomization
		require.NoError(t, yaml.UnmarshalStrict(b, &k))
		files, err := filepath.Glob(filepath.Join(dir, "*.yaml"))
		require.NoError(t, err)
		for _, f := range files {
			if name := filepath.Base(f); name != "kustomization.yaml" {
				require.Contains(t, k.Resources, name)
			}
			b, err := os.ReadFile(f)
			require.NoError(t, err)
			for doc := range strings.SplitSeq(string(b), "\n---\n") {
				_, err := yaml.YAMLToJSONStrict([]byte(doc))
				require.NoError(t, err, f)
			}
		}
	}
}

func TestManifests(t *testing.T) {
	m := build(t, ".")
	job := m.job.Spec
	require.Equal(t, batch.IndexedCompletion, *job.CompletionMode)
	require.Equal(t, *job.Completions, *job.Parallelism, "all pods are there together")
	require.Zero(t, *job.BackoffLimit)

	require.Len(t, m.namespaces, 1)
	require.Equal(t, "restricted", m.namespaces[0].Labels["pod-security.kubernetes.io/enforce"])
	pods := map[string]core.PodTemplateSpec{"contend": job.Template}
	require.Equal(t, m.namespaces[0].Name, m.job.Namespace)
	for _, d := range m.deployments {
		require.Equal(t, m.namespaces[0].Name, d.Namespace)
		require.Equal(t, d.Spec.Selector.MatchLabels, d.Spec.Template.Labels)
		pods[d.Name] = d.Spec.Template
	}
	for name, p := range pods {
		t.Run(name, func(t *testing.T) { requireRestricted(t, p.Spec) })
	}

	contend := job.Template.Spec.Containers[0]
	require.Equal(t, core.RestartPolicyNever, job.Template.Spec.RestartPolicy)
	require.Len(t, contend.EnvFrom, 2)
	require.Len(t, m.configs, 1)
	config := m.configs[0]
	require.Equal(t, config.Name, contend.EnvFrom[0].ConfigMapRef.Name, "the generated name has a hash, and the job has it too")
	require.Equal(t, "contend-start", contend.EnvFrom[1].ConfigMapRef.Name)
	require.Nil(t, contend.EnvFrom[1].ConfigMapRef.Optional, "pods wait for it")
	require.Equal(t, "FENCELAB_SEED", contend.Env[0].Name)
	require.Equal(t, "metadata.annotations['"+batch.JobCompletionIndexAnnotation+"']", contend.Env[0].ValueFrom.FieldRef.FieldPath)
	requireFlags(t, config.Data)

	host, port, _ := strings.Cut(config.Data["FENCELAB_LOCK_ADDR"], ":")
	require.Len(t, m.services, 1)
	require.Equal(t, host, m.services[0].Name)
	require.Equal(t, "6379", port)
	require.EqualValues(t, 6379, m.services[0].Spec.Ports[0].Port)
	require.Equal(t, pods[host].Labels, m.services[0].Spec.Selector)
	require.Equal(t, m.services[0].Spec.Ports[0].TargetPort.StrVal, pods[host].Spec.Containers[0].Ports[0].Name)

	require.Len(t, m.policies, 1)
	require.Subset(t, pods[host].Labels, m.policies[0].Spec.PodSelector.MatchLabels)
	require.Subset(t, job.Template.Labels, m.policies[0].Spec.Ingress[0].From[0].PodSelector.MatchLabels)

	monitors := build(t, "podmonitor").monitors
	require.Len(t, monitors, 1)
	require.Equal(t, m.job.Namespace, monitors[0].Namespace)
	require.Subset(t, job.Template.Labels, monitors[0].Spec.Selector.MatchLabels)
	require.Equal(t, contend.Ports[0].Name, *monitors[0].Spec.PodMetricsEndpoints[0].Port)
	require.Equal(t, monitoring.PrometheusProto, monitors[0].Spec.ScrapeProtocols[0])
	require.NotNil(t, monitors[0].Spec.ScrapeNativeHistograms)
	require.True(t, *monitors[0].Spec.ScrapeNativeHistograms)
	require.Equal(t, "9100", job.Template.Annotations["prometheus.io/port"])
	require.Equal(t, ":9100", config.Data["FENCELAB_METRICS"])
	require.EqualValues(t, 9100, contend.Ports[0].ContainerPort)
}

// requireRestricted: the pod passes the "restricted" Pod Security Standard, writes only to its volumes, and has
// resources.
func requireRestricted(t *testing.T, p core.PodSpec) {
	t.Helper()
	require.True(t, *p.SecurityContext.RunAsNonRoot)
	require.Positive(t, *p.SecurityContext.RunAsUser)
	require.Equal(t, core.SeccompProfileTypeRuntimeDefault, p.SecurityContext.SeccompProfile.Type)
	require.False(t, *p.AutomountServiceAccountToken)
	require.False(t, p.HostNetwork || p.HostPID || p.HostIPC)
	for _, c := range slices.Concat(p.InitContainers, p.Containers) {
		require.False(t, *c.SecurityContext.AllowPrivilegeEscalation)
		require.True(t, *c.SecurityContext.ReadOnlyRootFilesystem)
		require.Equal(t, []core.Capability{"ALL"}, c.SecurityContext.Capabilities.Drop)
		require.Empty(t, c.SecurityContext.Capabilities.Add)
		for _, r := range []core.ResourceName{core.ResourceCPU, core.ResourceMemory} {
			request, limit := c.Resources.Requests[r], c.Resources.Limits[r]
			require.Positive(t, request.Sign(), r)
			require.LessOrEqual(t, request.Cmp(limit), 0, r)
		}
		require.Contains(t, c.Image, ":")
	}
}

// requireFlags: each variable is a flag of contend; another would be ignored.
func requireFlags(t *testing.T, env map[string]string) {
	t.Helper()
	require.NotEmpty(t, env)
	cmd := exec.CommandContext(t.Context(), "go", "run", "./cmd/contend", "-h")
	cmd.Dir = "../.."
	help, err := cmd.Output()
	require.NoError(t, err)
	for name := range env {
		require.Regexp(t, `\(`+name+`[,)]`, string(help), "contend has no such flag")
	}
}

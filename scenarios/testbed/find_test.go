package testbed_test

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/testcontainers/testcontainers-go"

	"github.com/fencelab/fencelab/scenarios/testbed"
)

type ending struct{ how string }

func (e *ending) Helper() {}
func (e *ending) Skipf(format string, args ...any) {
	e.how = "skipped: " + fmt.Sprintf(format, args...)
}
func (e *ending) Fatal(args ...any) { e.how = "failed: " + fmt.Sprint(args...) }

func end(err error) string {
	var e ending
	testbed.Need(&e, err)
	return e.how
}

func TestNeed(t *testing.T) {
	t.Setenv("PATH", t.TempDir())
	t.Setenv("DOCKER_HOST", "tcp://127.0.0.1:1")
	t.Setenv(testbed.EnvStrict, "")
	for _, name := range []string{"REDIS", "ETCD", "S3", "DYNAMODB", "CONSUL"} {
		t.Setenv("FENCELAB_"+name+"_SERVER", "")
	}
	t.Chdir("/") // where make has built nothing
	for _, p := range []testbed.Provider{testbed.Auto, testbed.Local} {
		_, err := testbed.StartRedis(t.Context(), &testbed.Options{Provider: p})
		require.Regexp(t, "^skipped: no Redis here: (sudo apt-get install redis-server|brew install redis)$", end(err))
		_, err = testbed.StartEtcd(t.Context(), 1, &testbed.Options{Provider: p})
		require.Equal(t, "skipped: no etcd here: make bin/etcd", end(err))
		_, err = testbed.StartConsul(t.Context(), &testbed.Options{Provider: p})
		require.Equal(t, "skipped: no Consul here: make bin/consul", end(err))
		_, err = testbed.StartS3(t.Context(), &testbed.Options{Provider: p})
		require.Equal(t, "skipped: no S3 server here: make bin/versitygw", end(err))
		_, err = testbed.StartDynamoDB(t.Context(), &testbed.Options{Provider: p})
		require.Equal(t, "skipped: no DynamoDB server here: make bin/minidyn", end(err))
	}

	for _, p := range []testbed.Provider{testbed.Local, testbed.Containers, testbed.Auto} {
		t.Setenv(testbed.EnvProvider, string(p))
		s, err := testbed.StartRedis(t.Context(), &testbed.Options{AllowEmbedded: true})
		require.NoError(t, err)
		require.Equal(t, testbed.Embedded, s.Provider)
		require.NoError(t, s.Close())
	}

	o := &testbed.Options{Provider: testbed.Auto, AllowEmbedded: true}
	s, err := testbed.StartRedis(t.Context(), o)
	require.NoError(t, err)
	require.Equal(t, testbed.Embedded, s.Provider)
	require.Empty(t, end(nil))
	for _, err := range []error{s.Real(), s.Kill(t.Context())} {
		require.Contains(t, end(err), "skipped: no Redis here: ")
	}
	_, err = testbed.StartRedisReplica(t.Context(), s, nil)
	require.Contains(t, end(err), "skipped: no Redis here: ")
	require.NoError(t, s.Close())
	o.Args = moreArgs
	_, err = testbed.StartRedis(t.Context(), o)
	require.Contains(t, end(err), "skipped: no Redis here: ")

	t.Setenv(testbed.EnvStrict, "1")
	require.Contains(t, end(err), "failed: testbed: no Redis: auto found none")
	_, err = testbed.StartRedis(t.Context(), &testbed.Options{Provider: testbed.Auto, AllowEmbedded: true})
	require.Contains(t, end(err), "failed: testbed: no Redis: auto found none", "an imitation doesn't do")
}

// An etcd without etcdutl isn't used.
func TestNeedTool(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("PATH", dir)
	t.Setenv("FENCELAB_ETCD_SERVER", "")
	t.Setenv(testbed.EnvStrict, "")
	t.Chdir("/")
	dies := []byte("#!/bin/sh\necho 'out of luck' >&2\nexit 3\n")
	require.NoError(t, os.WriteFile(filepath.Join(dir, "etcd"), dies, 0o755))
	_, err := testbed.StartEtcd(t.Context(), 1, &testbed.Options{Provider: testbed.Local})
	require.Equal(t, "skipped: no etcd here: make bin/etcd", end(err))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "etcdutl"), dies, 0o755))
	_, err = testbed.StartEtcd(t.Context(), 1, &testbed.Options{Provider: testbed.Local})
	require.ErrorContains(t, err, "out of luck")
}

// A registry isn't asked for an image that is built here.
func TestNeedBuiltImage(t *testing.T) {
	requireDocker(t, "redis")
	t.Setenv(testbed.EnvStrict, "")
	t.Setenv("FENCELAB_REDIS_IMAGE", "fencelab/redis:none")
	var progress strings.Builder
	_, err := testbed.StartRedis(t.Context(), &testbed.Options{Provider: testbed.Containers, Progress: &progress})
	require.Equal(t, `skipped: no Redis image here: sudo env PATH="$PATH" make images`, end(err))
	require.NotContains(t, progress.String(), "pulling")
}

// testdata/setup pulls the image that testcontainers-go starts beside the first server.
func TestSetupReaper(t *testing.T) {
	b, err := os.ReadFile("../../testdata/setup")
	require.NoError(t, err)
	require.Contains(t, string(b), "\nreaper="+testcontainers.ReaperDefaultImage+" ") //nolint:staticcheck // its other name is internal
}

func TestNeedFails(t *testing.T) {
	t.Setenv(testbed.EnvStrict, "")
	t.Setenv("DOCKER_HOST", "tcp://127.0.0.1:1")
	dir := t.TempDir()
	dies := filepath.Join(dir, "redis-server")
	require.NoError(t, os.WriteFile(dies, []byte("#!/bin/sh\necho 'out of luck' >&2\nexit 3\n"), 0o755))
	for set, want := range map[string]string{dies: "out of luck", filepath.Join(dir, "gone"): "FENCELAB_REDIS_SERVER: "} {
		t.Setenv("FENCELAB_REDIS_SERVER", set)
		_, err := testbed.StartRedis(t.Context(), &testbed.Options{Provider: testbed.Local})
		require.Contains(t, end(err), "failed: testbed: no Redis: local: ")
		require.ErrorContains(t, err, want)
		t.Setenv(testbed.EnvProvider, "local")
		_, err = testbed.StartRedis(t.Context(), &testbed.Options{AllowEmbedded: true})
		require.ErrorContains(t, err, want, "an imitation doesn't do")
		_, err = testbed.StartRedis(t.Context(), &testbed.Options{Provider: testbed.Auto})
		require.Contains(t, end(err), "failed: testbed: no Redis: auto found none")
	}
}

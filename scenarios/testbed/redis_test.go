package testbed_test

import (
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/moby/moby/client"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/internal/testmain"
	"github.com/fencelab/fencelab/scenarios/testbed"
)

func TestOldRedis(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("PATH", dir)
	require.NoError(t, os.WriteFile(filepath.Join(dir, "redis-server"), []byte("#!/bin/sh\necho Redis server v=6.0.16 sha=0\n"), 0o700))
	_, err := testbed.StartRedis(t.Context(), &testbed.Options{Provider: testbed.Local})
	_, missing := errors.AsType[*testbed.MissingError](err)
	require.True(t, missing, err)
	require.ErrorContains(t, err, "redis-server is of version 6.0.16")
}

func startRedis(t *testing.T, o *testbed.Options) *testbed.Server {
	t.Helper()
	return testmain.Serve(t, testbed.StartRedis, o)
}

func dialRedis(t *testing.T, addr string) *redis.Client {
	t.Helper()
	c := redis.NewClient(&redis.Options{Addr: addr, ContextTimeoutEnabled: true})
	t.Cleanup(func() { require.NoError(t, c.Close()) })
	return c
}

func listens(t *testing.T, addr string) bool {
	t.Helper()
	conn, err := (&net.Dialer{Timeout: 30 * time.Second}).DialContext(t.Context(), "tcp", addr)
	if err == nil {
		require.NoError(t, conn.Close())
		return true
	}
	require.ErrorIs(t, err, syscall.ECONNREFUSED)
	return false
}

func requireGone(t *testing.T, addr string) {
	t.Helper()
	require.False(t, listens(t, addr), "a server still listens at %s", addr)
}

var moreArgs = []string{"--maxmemory", "1mb"}

func TestDockerHost(t *testing.T) {
	t.Setenv("DOCKER_HOST", "tcp://127.0.0.1:1")
	_, err := testbed.StartRedis(t.Context(), &testbed.Options{Provider: testbed.Containers})
	require.ErrorContains(t, err, "Docker")
}

func TestContainerRemovedByHand(t *testing.T) {
	docker := requireDocker(t, "redis")
	r := startRedis(t, &testbed.Options{Provider: testbed.Containers})
	_, err := docker.ContainerRemove(t.Context(), leftOf(t, docker, os.Getpid())[0], client.ContainerRemoveOptions{Force: true})
	require.NoError(t, err)
	require.NoError(t, r.Close())
	require.Empty(t, leftOf(t, docker, os.Getpid()))
}

func TestContainerStartCut(t *testing.T) {
	docker := requireDocker(t, "redis")
	cause := errors.New("test over")
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(cause)
	_, err := testbed.StartRedis(ctx, &testbed.Options{Provider: testbed.Containers})
	require.ErrorIs(t, err, cause)
	require.Empty(t, leftOf(t, docker, os.Getpid()))
}

func script(t *testing.T, dir, body string) string {
	t.Helper()
	path := filepath.Join(dir, "script")
	require.NoError(t, os.WriteFile(path, []byte("#!/bin/sh\ncd '"+dir+"' || exit\n"+body+"\n"), 0o700))
	return path
}

func TestAuto(t *testing.T) {
	const noImage = "FENCELAB_REDIS_IMAGE" + "=fencelab.invalid/redis:0"
	const noBinary = "FENCELAB_REDIS_SERVER" + "=/nonexistent/redis-server"
	auto := func(more ...string) []string { return append([]string{testbed.EnvProvider + "="}, more...) }

	t.Run("Containers", func(t *testing.T) {
		requireDocker(t, "redis")
		c := startChild(t, "auto", auto()...)
		require.Regexp(t, `^redis [\d.]+ \(containers\)$`, c.name, c.output)
	})
	t.Run("FallsThroughToLocal", func(t *testing.T) {
		need(t, testbed.Local, "redis")
		c := startChild(t, "auto", auto(noImage)...)
		require.Regexp(t, `^redis [\d.]+ \(local\)$`, c.name)
		require.Contains(t, c.output, "no Redis from containers: ")
		require.Contains(t, c.output, "trying local")
	})
	t.Run("Nothing", func(t *testing.T) {
		c := startChild(t, "auto", auto(noImage, noBinary)...)
		require.Error(t, c.Wait())
		require.Regexp(t, "make images|install or start Docker", c.output)
		for _, want := range []string{
			"\n  containers: ",
			"\n  local: FENCELAB_REDIS_SERVER: ", "/nonexistent/redis-server",
			"\n  external: set FENCELAB_TESTBED=external and FENCELAB_REDIS_ADDR=host:port",
		} {
			require.Contains(t, c.output, want)
		}
		require.NotContains(t, c.output, "embedded")
	})
	t.Run("EmbeddedIfAllowed", func(t *testing.T) {
		c := startChild(t, "embedded-too", auto(noImage, noBinary, testbed.EnvStrict+"=")...)
		require.Equal(t, "miniredis (embedded)", c.name)
	})
}

func TestParseProvider(t *testing.T) {
	const want = `testbed: provider "docker" is none of auto, containers, local, external, embedded`
	_, err := testbed.StartRedis(t.Context(), &testbed.Options{Provider: "docker"})
	require.EqualError(t, err, want)
	t.Setenv(testbed.EnvProvider, "docker")
	_, err = testbed.StartRedis(t.Context(), nil)
	require.EqualError(t, err, want)
}

package testbed_test

import (
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/moby/moby/client"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/scenarios/testbed"
)

// startRedis starts a Redis whose temporary files go to the directory it returns.
func startRedis(t *testing.T, o *testbed.Options) (*testbed.Server, string) {
	t.Helper()
	tmp := t.TempDir()
	t.Setenv("TMPDIR", tmp)
	r, err := testbed.StartRedis(t.Context(), o)
	testbed.Need(t, err)
	t.Cleanup(func() { require.NoError(t, r.Close()) })
	return r, tmp
}

func dialRedis(t *testing.T, addr string) *redis.Client {
	t.Helper()
	c := redis.NewClient(&redis.Options{Addr: addr, ContextTimeoutEnabled: true})
	t.Cleanup(func() { require.NoError(t, c.Close()) })
	return c
}

// listens reports whether somebody accepts connections at addr.
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

func requireReal(t *testing.T, r *testbed.Server) {
	t.Helper()
	require.Regexp(t, `^\d+\.\d+\.\d+$`, r.Version)
	require.Equal(t, "redis "+r.Version+" ("+string(r.Provider)+")", r.String())
	c := dialRedis(t, r.Addr)
	require.NoError(t, c.Do(t.Context(), "DEBUG", "SET-ACTIVE-EXPIRE", "1").Err())
	require.Equal(t, map[string]string{"save": ""}, c.ConfigGet(t.Context(), "save").Val())
	require.Equal(t, map[string]string{"maxmemory": "1048576"}, c.ConfigGet(t.Context(), "maxmemory").Val())
}

var moreArgs = []string{"--maxmemory", "1mb"}

func TestContainers(t *testing.T) {
	docker := requireDocker(t, "redis")
	r, _ := startRedis(t, &testbed.Options{Provider: testbed.Containers, Args: moreArgs})
	requireReal(t, r)
	require.Len(t, containersOf(t, docker, os.Getpid()), 1)

	require.NoError(t, r.Close())
	require.Empty(t, leftOf(t, docker, os.Getpid()))
	requireGone(t, r.Addr)
	require.NoError(t, r.Close(), "Close again")
}

// TestDockerHost asks for an engine that isn't there: another one must not take its place.
func TestDockerHost(t *testing.T) {
	t.Setenv("DOCKER_HOST", "tcp://127.0.0.1:1")
	_, err := testbed.StartRedis(t.Context(), &testbed.Options{Provider: testbed.Containers})
	require.ErrorContains(t, err, "Docker")
}

func TestContainerRemovedByHand(t *testing.T) {
	docker := requireDocker(t, "redis")
	r, _ := startRedis(t, &testbed.Options{Provider: testbed.Containers})
	for _, id := range containersOf(t, docker, os.Getpid()) {
		_, err := docker.ContainerRemove(t.Context(), id, client.ContainerRemoveOptions{Force: true})
		require.NoError(t, err)
	}
	require.NoError(t, r.Close())
	require.Empty(t, leftOf(t, docker, os.Getpid()))
}

func TestContainerThatExits(t *testing.T) {
	docker := requireDocker(t, "redis")
	_, err := testbed.StartRedis(t.Context(), &testbed.Options{
		Provider: testbed.Containers, Args: []string{"--no-such-directive", "1"},
	})
	require.ErrorContains(t, err, "exited with status 1")
	require.ErrorContains(t, err, "no-such-directive", "its log is in the error")
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

func TestLocal(t *testing.T) {
	need(t, testbed.Local, "redis")
	r, tmp := startRedis(t, &testbed.Options{Provider: testbed.Local, Args: moreArgs})
	requireReal(t, r)
	require.Len(t, entries(t, tmp), 1)

	require.NoError(t, r.Close())
	requireGone(t, r.Addr)
	require.Empty(t, entries(t, tmp))
	require.NoError(t, r.Close(), "Close again")
}

func TestLocalThatEnds(t *testing.T) {
	need(t, testbed.Local, "redis")
	tmp := t.TempDir()
	t.Setenv("TMPDIR", tmp)
	_, err := testbed.StartRedis(t.Context(), &testbed.Options{
		Provider: testbed.Local, Args: []string{"--no-such-directive", "1"},
	})
	require.ErrorContains(t, err, "exit status 1")
	require.ErrorContains(t, err, "no-such-directive", "its log is in the error")
	require.Empty(t, entries(t, tmp))
}

func TestLocalPortTaken(t *testing.T) {
	need(t, testbed.Local, "redis")
	dir := t.TempDir()
	t.Setenv(testbed.EnvRedisServer, script(t, dir, `
[ -e first ] && exec redis-server "$@"
touch first
echo "Warning: Could not create server TCP listening socket 127.0.0.1:1: bind: Address already in use"
exit 1`))
	startRedis(t, &testbed.Options{Provider: testbed.Local})
	require.FileExists(t, filepath.Join(dir, "first"))
}

// Another server has taken the port between its choice and the child's bind, and answers there.
func TestLocalAnotherAnswers(t *testing.T) {
	need(t, testbed.Local, "redis")
	dir := t.TempDir()
	fifo := filepath.Join(dir, "fifo")
	require.NoError(t, syscall.Mkfifo(fifo, 0o600))
	t.Setenv(testbed.EnvRedisServer, script(t, dir, `
[ -e other ] && exec redis-server "$@"
redis-server "$@" >/dev/null 2>&1 &
echo $! >other
echo "$4" >fifo
read go <fifo
echo "Warning: Could not create server TCP listening socket 127.0.0.1:$4: bind: Address already in use"
exit 1`))
	result := make(chan error, 1)
	var r *testbed.Server
	go func() {
		var err error
		r, err = testbed.StartRedis(t.Context(), &testbed.Options{Provider: testbed.Local})
		result <- err
	}()

	port, err := os.ReadFile(fifo) // blocks until the script writes it
	require.NoError(t, err)
	pid, err := os.ReadFile(filepath.Join(dir, "other"))
	require.NoError(t, err)
	other, err := strconv.Atoi(strings.TrimSpace(string(pid)))
	require.NoError(t, err)
	defer func() { require.NoError(t, syscall.Kill(other, syscall.SIGKILL)) }()
	addr := net.JoinHostPort("127.0.0.1", strings.TrimSpace(string(port)))
	require.Eventually(t, func() bool { return listens(t, addr) }, 30*time.Second, 5*time.Millisecond)
	select {
	case err := <-result:
		t.Fatalf("got %v, %v, want to wait for the child", r, err)
	case <-time.After(200 * time.Millisecond): // a start that takes the other for its child returns at once
	}
	require.NoError(t, os.WriteFile(fifo, []byte("go\n"), 0))

	require.NoError(t, <-result)
	require.NotEqual(t, addr, r.Addr)
	require.NoError(t, r.Close())
}

// script writes an executable shell script that runs in dir.
func script(t *testing.T, dir, body string) string {
	t.Helper()
	path := filepath.Join(dir, "script")
	require.NoError(t, os.WriteFile(path, []byte("#!/bin/sh\ncd '"+dir+"' || exit\n"+body+"\n"), 0o700))
	return path
}

func TestEmbedded(t *testing.T) {
	r, _ := startRedis(t, &testbed.Options{Provider: testbed.Embedded})
	require.Equal(t, "miniredis", r.Version)
	require.Equal(t, "miniredis (embedded)", r.String())

	c := dialRedis(t, r.Addr)
	require.NoError(t, c.Set(t.Context(), "key", "value", 50*time.Millisecond).Err())
	require.Eventually(t, func() bool { return c.Exists(t.Context(), "key").Val() == 0 },
		30*time.Second, 5*time.Millisecond, "a key expires in real time")

	require.NoError(t, r.Close())
	requireGone(t, r.Addr)
	require.NoError(t, r.Close(), "Close again")
}

func TestExternal(t *testing.T) {
	users, _ := startRedis(t, &testbed.Options{Provider: testbed.Local})
	require.NoError(t, dialRedis(t, users.Addr).ConfigSet(t.Context(), "requirepass", "secret").Err())
	t.Setenv(testbed.EnvProvider, "external")
	for _, tc := range []struct{ name, addr, err string }{
		{"Unset", "", "FENCELAB_REDIS_ADDR is not set: set it to the host:port or redis:// URL of your server"},
		{"URL", "redis://:secret@" + users.Addr + "/0", ""},
		{"NoPassword", users.Addr, "NOAUTH"},
		{"NobodyThere", "127.0.0.1:1", "the server at 127.0.0.1:1 (FENCELAB_REDIS_ADDR) does not answer"},
		{"OtherScheme", "http://:secret@localhost", "is neither host:port nor a redis:// or rediss:// URL"},
		{"NoURL", "redis://:secret@local host", "is neither host:port nor a redis:// or rediss:// URL"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Setenv(testbed.EnvRedisAddr, tc.addr)
			r, err := testbed.StartRedis(t.Context(), nil)
			if tc.err != "" {
				require.ErrorContains(t, err, tc.err)
				require.NotContains(t, err.Error(), "secret")
				return
			}
			require.NoError(t, err)
			require.Equal(t, testbed.External, r.Provider)
			require.Equal(t, users.Addr, r.Addr)
			require.Equal(t, users.Version, r.Version)
			require.NoError(t, r.Close())

			opt, err := redis.ParseURL(r.URL)
			require.NoError(t, err)
			c := redis.NewClient(opt)
			defer func() { require.NoError(t, c.Close()) }()
			require.NoError(t, c.Ping(t.Context()).Err(), "Close leaves the user's server alone")
		})
	}
}

func TestArgsUnsupported(t *testing.T) {
	for _, p := range []testbed.Provider{testbed.External, testbed.Embedded} {
		_, err := testbed.StartRedis(t.Context(), &testbed.Options{Provider: p, Args: moreArgs})
		require.ErrorIs(t, err, errors.ErrUnsupported, p)
	}
}

func TestAuto(t *testing.T) {
	const noImage = testbed.EnvRedisImage + "=fencelab.invalid/redis:0"
	const noBinary = testbed.EnvRedisServer + "=/nonexistent/redis-server"
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
		if dockerError(t) == nil {
			require.Contains(t, c.output, "make images")
		} else {
			require.Contains(t, c.output, "install or start Docker")
		}
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
	for _, p := range []testbed.Provider{
		testbed.Auto, testbed.Containers, testbed.Local, testbed.External, testbed.Embedded,
	} {
		got, err := testbed.ParseProvider(string(p))
		require.NoError(t, err)
		require.Equal(t, p, got)
	}
	const want = `testbed: provider "docker" is none of auto, containers, local, external, embedded`
	_, err := testbed.ParseProvider("docker")
	require.EqualError(t, err, want)
	_, err = testbed.StartRedis(t.Context(), &testbed.Options{Provider: "docker"})
	require.EqualError(t, err, want)
	t.Setenv(testbed.EnvProvider, "docker")
	_, err = testbed.StartRedis(t.Context(), nil)
	require.EqualError(t, err, want)
}

package testbed_test

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/moby/moby/client"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/fencelab/fencelab/internal/leak"
	"github.com/fencelab/fencelab/scenarios/testbed"
)

// envChild makes the test binary a process that starts a Redis, or an etcd of three members if it is "etcd", says so
// and waits to be killed.
const envChild = "TESTBED_TEST_CHILD"

func TestMain(m *testing.M) {
	if os.Getenv(envChild) != "" {
		os.Exit(childMain())
	}
	// net/http dials in a goroutine that no Close ends: to a container that was killed it tries until the kernel gives up.
	leak.Main(m, goleak.IgnoreAnyFunction("net/http.(*Transport).dialConn"))
}

func childMain() int {
	o := &testbed.Options{AllowEmbedded: os.Getenv(envChild) == "embedded-too", Progress: os.Stdout}
	var r interface {
		fmt.Stringer
		io.Closer
	}
	var addr string
	if os.Getenv(envChild) == "etcd" {
		c, err := testbed.StartEtcd(context.Background(), 3, o)
		if err != nil {
			fmt.Println(err)
			return 1
		}
		r, addr = c, c.Addrs()[0]
	} else {
		s, err := testbed.StartRedis(context.Background(), o)
		if err != nil {
			fmt.Println(err)
			return 1
		}
		r, addr = s, s.Addr
	}
	fmt.Println(readyPrefix+addr, r)
	_, _ = io.Copy(io.Discard, os.Stdin) // until the parent closes it, or is gone
	if err := r.Close(); err != nil {
		fmt.Println(err)
		return 1
	}
	return 0
}

const readyPrefix = "ready at "

// child is a process that has started a Redis or an etcd, or failed to.
type child struct {
	*exec.Cmd
	tmp    string // its directory for temporary files
	addr   string // of its server; empty if there is none
	name   string // its server's String
	output string // what it printed before that
}

// startChild returns once the child has a server or has failed.
func startChild(t *testing.T, mode string, env ...string) *child {
	t.Helper()
	c := prepareChild(t, mode, env...)
	out, err := c.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, c.Start())
	var lines strings.Builder
	for sc := bufio.NewScanner(out); sc.Scan(); {
		if ready, ok := strings.CutPrefix(sc.Text(), readyPrefix); ok {
			c.addr, c.name, _ = strings.Cut(ready, " ")
			break
		}
		fmt.Fprintln(&lines, sc.Text())
	}
	c.output = lines.String()
	return c
}

func prepareChild(t *testing.T, mode string, env ...string) *child {
	t.Helper()
	self, err := os.Executable()
	require.NoError(t, err)
	c := &child{Cmd: exec.CommandContext(context.WithoutCancel(t.Context()), self), tmp: t.TempDir()}
	c.Env = append(os.Environ(), envChild+"="+mode, "TMPDIR="+c.tmp)
	c.Env = append(c.Env, env...)
	c.Stderr = os.Stderr
	stdin, err := c.StdinPipe()
	require.NoError(t, err)
	t.Cleanup(func() {
		if c.Process != nil && c.ProcessState == nil {
			require.NoError(t, stdin.Close())
			require.NoError(t, c.Wait())
		}
	})
	return c
}

// requireDocker skips the test where servers of that kind can't run in containers.
func requireDocker(t *testing.T, kind string) *client.Client {
	t.Helper()
	need(t, testbed.Containers, kind)
	return newDocker(t)
}

// dockerError says why no Docker engine answers; nil: one does.
func dockerError(t *testing.T) error {
	t.Helper()
	_, err := newDocker(t).Ping(t.Context(), client.PingOptions{})
	return err
}

func newDocker(t *testing.T) *client.Client {
	t.Helper()
	docker, err := client.New(client.FromEnv)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, docker.Close()) })
	return docker
}

// containersOf lists the containers that process pid has started.
func containersOf(t *testing.T, docker *client.Client, pid int) []string {
	t.Helper()
	list, err := docker.ContainerList(t.Context(), client.ContainerListOptions{
		All: true, Filters: make(client.Filters).Add("label", "dev.fencelab.owner="+strconv.Itoa(pid)),
	})
	require.NoError(t, err)
	ids := make([]string, len(list.Items))
	for i, c := range list.Items {
		ids[i] = c.ID
	}
	return ids
}

// leftOf lists all that process pid has in the engine.
func leftOf(t *testing.T, docker *client.Client, pid int) []string {
	t.Helper()
	left := containersOf(t, docker, pid)
	filters := make(client.Filters).Add("label", "dev.fencelab.owner="+strconv.Itoa(pid))
	networks, err := docker.NetworkList(t.Context(), client.NetworkListOptions{Filters: filters})
	require.NoError(t, err)
	for _, n := range networks.Items {
		left = append(left, "network "+n.Name)
	}
	volumes, err := docker.VolumeList(t.Context(), client.VolumeListOptions{Filters: filters})
	require.NoError(t, err)
	for _, v := range volumes.Items {
		left = append(left, "volume "+v.Name)
	}
	return left
}

// requireSwept requires that nothing is left in the engine of what process pid had there. Whoever starts a container sweeps:
// another process may be about to remove the last of it.
func requireSwept(t *testing.T, docker *client.Client, pid int) {
	t.Helper()
	require.Eventually(t, func() bool { return len(leftOf(t, docker, pid)) == 0 }, time.Minute, 10*time.Millisecond)
}

func entries(t *testing.T, dir string) []string {
	t.Helper()
	list, err := os.ReadDir(dir)
	require.NoError(t, err)
	names := make([]string, len(list))
	for i, e := range list {
		names[i] = e.Name()
	}
	return names
}

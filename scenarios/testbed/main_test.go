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

	"github.com/moby/moby/client"
	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/internal/testmain"
	"github.com/fencelab/fencelab/scenarios/testbed"
)

// envChild makes the test binary a process that starts the named server, or a Redis, and waits until its input ends.
const envChild = "TESTBED_TEST_CHILD"

func TestMain(m *testing.M) {
	if os.Getenv(envChild) != "" {
		os.Exit(childMain())
	}
	testmain.Run(m)
}

func childMain() int {
	what := os.Getenv(envChild)
	o := &testbed.Options{AllowEmbedded: what == "embedded-too", Progress: os.Stdout}
	var r interface {
		fmt.Stringer
		io.Closer
	}
	var addr string
	var err error
	switch what {
	case "directory":
		if addr, err = testbed.MkdirTemp("server"); err == nil {
			fmt.Println(readyPrefix + addr)
			select {}
		}
	case "etcd":
		var c *testbed.Cluster
		if c, err = testbed.StartEtcd(context.Background(), 3, o); err == nil {
			r, addr = c, c.Addrs()[0]
		}
	default:
		var s *testbed.Server
		if s, err = testbed.StartRedis(context.Background(), o); err == nil {
			r, addr = s, s.Addr
		}
	}
	if err == nil {
		fmt.Println(readyPrefix+addr, r)
		_, _ = io.Copy(io.Discard, os.Stdin)
		err = r.Close()
	}
	if err != nil {
		fmt.Println(err)
		return 1
	}
	return 0
}

const readyPrefix = "ready at "

// child is a process that has started a server, or failed to.
type child struct {
	*exec.Cmd
	tmp    string
	addr   string // of its server; empty if it failed
	name   string
	output string
}

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

func requireDocker(t *testing.T, serverType string) *client.Client {
	t.Helper()
	need(t, testbed.Containers, serverType)
	return newDocker(t)
}

func newDocker(t *testing.T) *client.Client {
	t.Helper()
	docker, err := client.New(client.FromEnv)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, docker.Close()) })
	return docker
}

const label = "dev.fencelab.owner"

// leftOf lists all that a process has in the engine.
func leftOf(t *testing.T, docker *client.Client, pid int) []string {
	t.Helper()
	var found []string
	add := func(labels map[string]string, id string) {
		if strings.HasPrefix(labels[label], strconv.Itoa(pid)+"-") {
			found = append(found, id)
		}
	}
	owned := make(client.Filters).Add("label", label)
	containers, err := docker.ContainerList(t.Context(), client.ContainerListOptions{All: true, Filters: owned})
	require.NoError(t, err)
	for _, c := range containers.Items {
		add(c.Labels, c.ID)
	}
	networks, err := docker.NetworkList(t.Context(), client.NetworkListOptions{Filters: owned})
	require.NoError(t, err)
	for _, n := range networks.Items {
		add(n.Labels, n.Name)
	}
	volumes, err := docker.VolumeList(t.Context(), client.VolumeListOptions{Filters: owned})
	require.NoError(t, err)
	for _, v := range volumes.Items {
		add(v.Labels, v.Name)
	}
	return found
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

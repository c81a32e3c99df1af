package main

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// machine is a directory with testdata/setup and the programs that it finds.
type machine struct {
	t    *testing.T
	root string
}

func newMachine(t *testing.T) machine {
	t.Helper()
	m := machine{t, t.TempDir()}
	b, err := os.ReadFile("../../testdata/setup")
	require.NoError(t, err)
	m.write("testdata/setup", string(b))
	m.write("scenarios/testbed/redis.go", "\timage: \"redis:1\",\n")
	m.write("scenarios/testbed/etcd.go", "\timage: \"etcd:2\",\n")
	for _, name := range []string{"bash", "env", "dirname", "mkdir", "sed", "grep", "tail", "cut", "tr", "cat", "chmod", "rm", "tee", "timeout", "true"} {
		path, err := exec.LookPath(name)
		require.NoError(t, err)
		require.NoError(t, os.MkdirAll(filepath.Join(m.root, "path"), 0o755))
		require.NoError(t, os.Symlink(path, filepath.Join(m.root, "path", name)))
	}
	m.has("uname", "echo Linux")
	m.has("id", "echo 1000")
	m.has("make", `for a; do case $a in bin/*) mkdir -p bin; [ "$1" = -q ] && exit 1; echo "built $a" >>built; : >"$a"; chmod 755 "$a" ;; esac; done`)
	return m
}

func (m machine) write(name, text string) {
	m.t.Helper()
	path := filepath.Join(m.root, name)
	require.NoError(m.t, os.MkdirAll(filepath.Dir(path), 0o755))
	require.NoError(m.t, os.WriteFile(path, []byte(text), 0o755))
}

func (m machine) has(name, script string) {
	m.t.Helper()
	m.write("path/"+name, "#!/bin/sh\n"+script+"\n")
}

// setup runs the script, and returns its output, exit status and provider of servers.
func (m machine) setup(env ...string) (said string, status int, testbed string) {
	m.t.Helper()
	cmd := exec.CommandContext(m.t.Context(), filepath.Join(m.root, "testdata/setup"))
	cmd.Env = append([]string{"PATH=" + filepath.Join(m.root, "path"), "SETUP_USR=" + m.root}, env...)
	out, err := cmd.CombinedOutput()
	if exit, ok := errors.AsType[*exec.ExitError](err); ok {
		status, err = exit.ExitCode(), nil
	}
	require.NoError(m.t, err)
	b, _ := os.ReadFile(filepath.Join(m.root, "bin/testbed"))
	return string(out), status, strings.TrimSpace(string(b))
}

func (m machine) built() string {
	b, _ := os.ReadFile(filepath.Join(m.root, "built"))
	return strings.ReplaceAll(strings.TrimSpace(string(b)), "\n", ", ")
}

func TestSetupUnprivileged(t *testing.T) {
	m := newMachine(t)
	m.has("apt-get", "echo must not be called; exit 1")
	m.has("sudo", "exit 1") // it would ask for a password
	said, status, testbed := m.setup()
	require.Zero(t, status, said)
	require.Contains(t, said, "setup: going on without Redis, ZooKeeper, PostgreSQL, strace, Spin, which comes with: "+
		"sudo apt-get install redis-server zookeeper default-jre-headless postgresql strace spin\n")
	require.Contains(t, said, "setup: leaving out Consul, whose build takes minutes: make test SERVERS=all\n")
	require.Equal(t, "built bin/etcd, built bin/versitygw, built bin/minidyn", m.built())
	require.Equal(t, "local", testbed)

	said, status, _ = m.setup("SERVERS=all", "FENCELAB_STRICT=1")
	require.Equal(t, 1, status)
	require.Contains(t, said, "setup: FENCELAB_STRICT=1, and there is no Redis, ZooKeeper, PostgreSQL, strace, Spin\n")
	require.Contains(t, m.built(), "built bin/consul")
}

func TestSetupPackages(t *testing.T) {
	m := newMachine(t)
	m.has("zkServer.sh", "")
	m.has("postgres", "")
	m.has("sudo", `shift; exec "$@"`) // as -n without a password
	m.has("apt-get", `echo "$@" >>apt`)
	said, status, _ := m.setup()
	require.Zero(t, status, said)
	require.Contains(t, said, "setup: installing with apt-get, outside this directory: redis-server strace spin (about a minute; SETUP=off forbids it)\n")
	require.Contains(t, said, "setup: ready: servers are local\n")
	b, err := os.ReadFile(filepath.Join(m.root, "apt"))
	require.NoError(t, err)
	require.Equal(t, "-q update\n-qy --no-install-recommends -o DPkg::Lock::Timeout=300 install redis-server strace spin\n", string(b))

	m.has("apt-get", `echo "E: Unable to locate package redis-server"; exit 100`)
	m.has("make", `[ "$1" = -q ] && exit 1; echo "write bin/etcd: no space left on device"; exit 2`)
	said, status, _ = m.setup()
	require.Zero(t, status, said)
	require.Contains(t, said, "setup: apt-get failed: E: Unable to locate package redis-server; see bin/setup.log\n")
	require.Contains(t, said, "setup: going on without Redis, strace, Spin, which comes with: sudo apt-get install redis-server strace spin\n")
	require.Contains(t, said, "setup: going on without versitygw: make bin/versitygw failed: write bin/etcd: no space left on device; see bin/setup.log\n")
}

func TestSetupSomePackages(t *testing.T) {
	m := newMachine(t)
	m.has("zkServer.sh", "")
	m.has("postgres", "")
	m.has("sudo", `shift; exec "$@"`)
	m.has("apt-get", `for p; do :; done
		case "$*" in *update|*"strace spin"|*install\ spin) echo "E: no $p"; exit 100 ;; esac
		printf '#!/bin/sh\n' >path/$p; chmod 755 path/$p`)
	said, status, _ := m.setup()
	require.Zero(t, status, said)
	require.Contains(t, said, "setup: apt-get failed: E: no spin; see bin/setup.log\n")
	require.Contains(t, said, "setup: going on without Spin, which comes with: sudo apt-get install spin\n")
}

func TestSetupRefuses(t *testing.T) {
	m := newMachine(t)
	said, status, _ := m.setup("FENCELAB_TESTBED=docker")
	require.Equal(t, 1, status)
	require.Equal(t, "setup: FENCELAB_TESTBED is \"docker\"; it can be auto, containers, local, external or embedded\n", said)
	m.write("bin", "") // no directory can be created
	said, status, _ = m.setup()
	require.Equal(t, 1, status)
	require.Contains(t, said, m.root+" can't be written to; SETUP=off makes do with the servers that are there\n")
}

func TestSetupImages(t *testing.T) {
	m := newMachine(t)
	m.has("strace", "")
	m.has("spin", "")
	m.has("docker", `case $1 in image) exit 1 ;; pull) echo "$3" >>pulled ;; esac`)
	said, status, testbed := m.setup()
	require.Zero(t, status, said)
	require.Contains(t, said, "setup: pulling 2 images: etcd:2 redis:1\n")
	require.Contains(t, said, "setup: ready: servers are containers\n")
	require.Equal(t, "containers", testbed)
	require.Empty(t, m.built())

	// Images that were built here, and no timeout(1), which macOS lacks.
	m.write("testdata/images/images.env", "")
	require.NoError(t, os.Remove(filepath.Join(m.root, "path/timeout")))
	m.has("docker", `case $1 in image|pull) exit 1 ;; esac`)
	said, _, testbed = m.setup()
	require.Contains(t, said, "setup: ready: servers are containers\n")
	require.Equal(t, "containers", testbed)
	require.NoError(t, os.Remove(filepath.Join(m.root, "testdata/images/images.env")))
	m.has("docker", `case $1 in image) exit 1 ;; esac`)
	said, _, _ = m.setup()
	require.Contains(t, said, "setup: ready: servers are containers\n")

	m.has("docker", `case $1 in image) exit 1 ;; pull) echo "no such host"; exit 1 ;; esac`)
	said, _, testbed = m.setup()
	require.Contains(t, said, "setup: a Docker engine answers, and images cannot be pulled (no such host): servers are local processes\n")
	require.Equal(t, "local", testbed)
	said, status, testbed = m.setup("FENCELAB_TESTBED=containers", "FENCELAB_STRICT=1")
	require.Equal(t, 1, status)
	require.Contains(t, said, "setup: going on without images: no registry answers; sudo env PATH=\"$PATH\" make images builds them\n")
	require.Equal(t, "containers", testbed)
	m.has("docker", "exit 1")
	said, _, _ = m.setup("FENCELAB_TESTBED=containers")
	require.Contains(t, said, "setup: going on without containers: no Docker engine answers: docker version says why\n")
}

func TestSetupOff(t *testing.T) {
	for _, off := range []string{"SETUP=off", "FENCELAB_TESTBED=external", "FENCELAB_TESTBED=embedded"} {
		m := newMachine(t)
		said, status, testbed := m.setup(off)
		require.Zero(t, status)
		require.Empty(t, said)
		require.Empty(t, testbed)
		require.NoDirExists(t, filepath.Join(m.root, "bin"))
	}
}

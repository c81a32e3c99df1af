package main

import (
	"errors"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

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
	m.write("usr/sbin/x", "")
	m.has("uname", "echo Linux")
	m.has("id", "echo 1000")
	m.has("make", `for a; do case $a in bin/*) mkdir -p bin; [ "$1" = -q ] && exit 1; echo "built $a" >>built; : >"$a"; chmod 755 "$a" ;; esac; done`)
	return m
}

func (m machine) write(name, text string) {
	m.t.Helper()
	path := filepath.Join(m.root, name)
	require.NoError(m.t, os.MkdirAll(filepath.Dir(path), 0o755))
	require.NoError(m.t, os.RemoveAll(path)) // it may be a link to a program of this machine
	require.NoError(m.t, os.WriteFile(path, []byte(text), 0o755))
}

func (m machine) has(name, script string) {
	m.t.Helper()
	m.write("path/"+name, "#!/bin/sh\n"+script+"\n")
}

func (m machine) command(env ...string) *exec.Cmd {
	cmd := exec.CommandContext(m.t.Context(), filepath.Join(m.root, "testdata/setup"))
	cmd.Env = append([]string{"PATH=" + filepath.Join(m.root, "path"), "SETUP_USR=" + filepath.Join(m.root, "usr")}, env...)
	return cmd
}

// setup runs the script, requires its exit status and what it says, and returns all that it says.
func (m machine) setup(want int, env string, says ...string) string {
	m.t.Helper()
	out, err := m.command(strings.Fields(env)...).CombinedOutput()
	status := 0
	if exit, ok := errors.AsType[*exec.ExitError](err); ok {
		status, err = exit.ExitCode(), nil
	}
	require.NoError(m.t, err)
	require.Equal(m.t, want, status, "%s", out)
	for _, line := range says {
		require.Contains(m.t, string(out), "setup: "+line+"\n")
	}
	return string(out)
}

// testbed is where servers are to come from.
func (m machine) testbed() string { return m.read("bin/testbed") }

// read returns a file's lines in one.
func (m machine) read(name string) string {
	b, _ := os.ReadFile(filepath.Join(m.root, name))
	return strings.ReplaceAll(strings.TrimSpace(string(b)), "\n", ", ")
}

func TestSetupUnprivileged(t *testing.T) {
	m := newMachine(t)
	m.has("apt-get", "echo must not be called; exit 1")
	m.has("sudo", "exit 1") // it would ask for a password
	m.setup(0, "", "going on without Redis, ZooKeeper, PostgreSQL, strace, Spin, which comes with: "+
		"sudo apt-get install redis-server zookeeper default-jre-headless postgresql strace spin",
		"leaving out Consul, whose build takes minutes: make test SERVERS=all")
	require.Equal(t, "built bin/etcd, built bin/versitygw, built bin/minidyn", m.read("built"))
	require.Equal(t, "local", m.testbed())
	m.setup(1, "SERVERS=all FENCELAB_STRICT=1", "FENCELAB_STRICT=1, and there is no Redis, ZooKeeper, PostgreSQL, strace, Spin")
	require.Contains(t, m.read("built"), "built bin/consul")
}

// debian is a machine with ZooKeeper and PostgreSQL, and sudo without a password.
func debian(t *testing.T) machine {
	t.Helper()
	m := newMachine(t)
	m.has("zkServer.sh", "")
	m.has("postgres", "")
	m.has("sudo", `shift; exec "$@"`) // as -n
	return m
}

func TestSetupPackages(t *testing.T) {
	m := debian(t)
	m.has("apt-get", `echo "$@" >>apt`)
	m.setup(0, "", "installing with apt-get, outside this directory: redis-server strace spin (about a minute; SETUP=off forbids it)",
		"ready: servers are local")
	const options = "-o Acquire::Retries=1 -o Acquire::http::Timeout=30 -o Acquire::https::Timeout=30"
	require.Equal(t, "-q "+options+" update, "+
		"-qy --no-install-recommends "+options+" -o DPkg::Lock::Timeout=300 install redis-server strace spin", m.read("apt"))

	m.has("apt-get", `echo "E: Unable to locate package redis-server"; exit 100`)
	m.has("make", `[ "$1" = -q ] && exit 1; echo "write bin/etcd: no space left on device"; echo; echo "make: *** [Makefile:92: bin/etcd] Error 1"; exit 2`)
	m.setup(0, "", "apt-get failed: E: Unable to locate package redis-server; see bin/setup.log",
		"going on without Redis, strace, Spin, which comes with: sudo apt-get install redis-server strace spin",
		"going on without versitygw: make bin/versitygw failed: write bin/etcd: no space left on device; see bin/setup.log")
}

func TestSetupSomePackages(t *testing.T) {
	m := debian(t)
	m.has("apt-get", `for p; do :; done
		case "$*" in *update|*"strace spin"|*=0\ spin) echo "E: no $p"; exit 100 ;; esac
		printf '#!/bin/sh\n' >path/$p; chmod 755 path/$p`)
	m.setup(0, "", "apt-get failed: E: no spin; see bin/setup.log", "going on without Spin, which comes with: sudo apt-get install spin")
}

// Each package is tried alone, and none waits for the lock again. Meanwhile progress is reported.
func TestSetupSlowPackages(t *testing.T) {
	m := debian(t)
	m.has("redis-server", "")
	m.has("sleep", `if [ -e slept ]; then : >again; exit 1; fi; : >slept; until grep -q Get bin/setup.log || [ ! -e bin ]; do :; done`)
	m.has("apt-get", `echo "Get:1 strace"; n=0; until [ -e again ] || [ $n = 5000000 ]; do n=$((n+1)); done
		echo "$@" >>apt; case "$*" in *install*) echo "E: Could not get lock"; exit 100 ;; esac`)
	said := m.setup(0, "", "apt-get failed: E: Could not get lock; see bin/setup.log")
	require.Regexp(t, `setup: apt-get has been at work for \d+ s: Get:1 strace\n`, said)
	require.Regexp(t, `Timeout=300 install strace spin, .*install -o DPkg::Lock::Timeout=0 strace, .*install -o DPkg::Lock::Timeout=0 spin$`, m.read("apt"))
}

// The file that keeps services from starting is removed, also one of a run that was killed. A user's stays.
func TestSetupPolicy(t *testing.T) {
	m := newMachine(t)
	m.has("sudo", `shift; exec "$@"`)
	policy := filepath.Join(m.root, "usr/sbin/policy-rc.d")
	m.has("apt-get", "cp "+policy+" seen")
	cp, err := exec.LookPath("cp")
	require.NoError(t, err)
	require.NoError(t, os.Symlink(cp, filepath.Join(m.root, "path/cp")))
	for range 2 {
		m.setup(0, "", policy+" keeps their services from starting meanwhile")
		require.NoFileExists(t, policy)
		require.Contains(t, m.read("seen"), "exit 101")
		m.write("usr/sbin/policy-rc.d", strings.ReplaceAll(m.read("seen"), ", ", "\n"))
	}
	m.write("usr/sbin/policy-rc.d", "#!/bin/sh\nexit 104\n")
	require.NotContains(t, m.setup(0, ""), "keeps their services")
	require.FileExists(t, policy)
}

// Ctrl-C ends it, also if the program under way exits as usual, as docker does.
func TestSetupInterrupted(t *testing.T) {
	m := newMachine(t)
	sleep, err := exec.LookPath("sleep")
	require.NoError(t, err)
	m.has("docker", `case $1 in image) exit 1 ;; pull)
		trap "exit 1" INT; : >pulling; for i in 1 2 3 4 5 6 7 8 9 10 11 12; do `+sleep+` 5; done ;; esac`)
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, os.Interrupt) // children of a process that ignores it would, too
	defer signal.Stop(signals)
	cmd := m.command()
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	require.NoError(t, cmd.Start())
	require.Eventually(t, func() bool {
		_, err := os.Stat(filepath.Join(m.root, "pulling"))
		return err == nil
	}, 30*time.Second, 10*time.Millisecond)
	require.NoError(t, syscall.Kill(-cmd.Process.Pid, syscall.SIGINT))
	interrupted := time.Now()
	exit, ok := errors.AsType[*exec.ExitError](cmd.Wait())
	require.True(t, ok)
	require.Equal(t, 130, exit.ExitCode())
	require.Less(t, time.Since(interrupted), 40*time.Second, "the pull goes on")
}

func TestSetupRefuses(t *testing.T) {
	m := newMachine(t)
	m.setup(1, "FENCELAB_TESTBED=docker", `FENCELAB_TESTBED is "docker"; it can be auto, containers, local, external or embedded`)
	m.write("bin", "") // no directory can be created
	m.setup(1, "", m.root+" can't be written to; SETUP=off makes do with the servers that are there")
}

func TestSetupImages(t *testing.T) {
	m := newMachine(t)
	m.has("strace", "")
	m.has("spin", "")
	m.has("docker", `case $1 in image) exit 1 ;; pull) echo "$3" >>pulled ;; esac`)
	said := m.setup(0, "", "ready: servers are containers")
	require.Contains(t, said, "setup: pulling 3 images: etcd:2 redis:1 testcontainers/ryuk:")
	require.Equal(t, "containers", m.testbed())
	require.Empty(t, m.read("built"))

	// Images that were built here, and no timeout, which macOS lacks.
	const env = "testdata/images/images.env"
	m.write(env, "FENCELAB_REDIS_IMAGE=fencelab/redis:7\nFENCELAB_ETCD_IMAGE=fencelab/etcd:3\nTESTCONTAINERS_RYUK_DISABLED=true\n")
	require.NoError(t, os.Remove(filepath.Join(m.root, "path/timeout")))
	m.has("docker", `case $* in "image inspect fencelab/redis:7 fencelab/etcd:3") ;; image*|pull*) exit 1 ;; esac`)
	for _, provider := range []string{"auto", "containers"} {
		m.setup(0, "FENCELAB_STRICT=1 FENCELAB_TESTBED="+provider, "ready: servers are containers")
		require.Equal(t, "containers", m.testbed())
	}
	// They may be gone.
	m.has("docker", `case $1 in image) exit 1 ;; pull) echo "$3" >>pulled-too ;; esac`)
	m.setup(0, "", "the Docker engine lacks images that testdata/images/images.env names: servers are local processes; "+
		"sudo env PATH=\"$PATH\" make images builds them again, rm testdata/images/images.env has others pulled")
	require.Equal(t, "local", m.testbed())
	require.NoFileExists(t, filepath.Join(m.root, "pulled-too"))
	const strict = "FENCELAB_TESTBED=containers FENCELAB_STRICT=1"
	m.setup(1, strict, "going on without images: the Docker engine lacks images that testdata/images/images.env names; "+
		"sudo env PATH=\"$PATH\" make images builds them")

	require.NoError(t, os.Remove(filepath.Join(m.root, env)))
	m.has("docker", `case $1 in image) exit 1 ;; pull) echo "$3" >>pulled-without ;; esac`)
	m.setup(0, "TESTCONTAINERS_RYUK_DISABLED=true", "pulling 2 images: etcd:2 redis:1", "ready: servers are containers")

	m.has("docker", `case $1 in image) exit 1 ;; pull) echo "no such host"; exit 1 ;; esac`)
	m.setup(0, "", "a Docker engine answers, and images cannot be pulled (no such host): servers are local processes")
	require.Equal(t, "local", m.testbed())
	m.setup(1, strict, "going on without images: no registry answers; sudo env PATH=\"$PATH\" make images builds them")
	require.Equal(t, "containers", m.testbed())
	m.has("docker", "exit 1")
	m.setup(0, "FENCELAB_TESTBED=containers", "going on without containers: no Docker engine answers; run docker version for details")
}

// An engine that hangs is none.
func TestSetupHungEngine(t *testing.T) {
	m := newMachine(t)
	m.has("docker", "")
	m.has("timeout", `shift; limit=$1; shift; case $* in docker\ version) [ "$limit" = 20 ] && exit 124 ;; esac; exec "$@"`)
	m.setup(0, "")
	require.Equal(t, "local", m.testbed())
}

// An etcd without etcdutl, as that of Debian 12, isn't used.
func TestSetupEtcd(t *testing.T) {
	m := newMachine(t)
	m.has("etcd", "")
	m.has("versitygw", "")
	m.setup(0, "")
	require.Equal(t, "built bin/etcd, built bin/minidyn", m.read("built"))
	m.has("etcdutl", "")
	require.NoError(t, os.Remove(filepath.Join(m.root, "built")))
	m.setup(0, "")
	require.Equal(t, "built bin/minidyn", m.read("built"))
}

// On macOS no Debian package is named, and Homebrew's PostgreSQL is found, which isn't in PATH.
func TestSetupDarwin(t *testing.T) {
	m := newMachine(t)
	m.has("uname", "echo Darwin")
	m.has("redis-server", "")
	m.has("zkServer", "")
	m.setup(0, "", "going on without PostgreSQL: brew install postgresql@15")
	for _, dir := range []string{"opt/homebrew/opt", "usr/local/opt"} {
		postgres := dir + "/postgresql@15/bin/postgres"
		m.write(postgres, "")
		m.setup(0, "FENCELAB_STRICT=1", "ready: servers are local")
		require.NoError(t, os.Remove(filepath.Join(m.root, postgres)))
	}
	m.has("docker", "")
	require.NotContains(t, m.setup(0, "FENCELAB_STRICT=1", "ready: servers are containers"), "apt-get")
}

// makefile runs make in a directory for which set-up has chosen local servers, with a fake go.
func makefile(t *testing.T, goScript string, args ...string) (string, error) {
	t.Helper()
	if _, err := exec.LookPath("make"); err != nil {
		t.Skip("not applicable: there is no make")
	}
	m := machine{t, t.TempDir()}
	b, err := os.ReadFile("../../Makefile")
	require.NoError(t, err)
	m.write("Makefile", string(b))
	m.write("bin/testbed", "local\n")
	m.has("go", goScript)
	cmd := exec.CommandContext(t.Context(), "make", append([]string{"-C", m.root, "GO=" + filepath.Join(m.root, "path/go")}, args...)...)
	cmd.Env = []string{"PATH=" + os.Getenv("PATH")} // not the variables of a make that runs this test
	out, err := cmd.CombinedOutput()
	return string(out), err
}

// A test's modules that a demo hasn't downloaded are downloaded first, or missed in one sentence.
func TestModules(t *testing.T) {
	const lacks = `case $* in env*) echo there; exit ;; *" -test ./...") ;; *) exit ;; esac
		[ "$GOPROXY" = off ] && { echo "a.go:1:2: module lookup disabled by GOPROXY=off" >&2; exit 1; }
		echo "go: downloading a" >&2; `
	out, err := makefile(t, lacks, "modules", "compiled=-test ./...")
	require.NoError(t, err, out)
	require.Equal(t, 1, strings.Count(out, "downloading"), out)
	require.Contains(t, out, "make: downloading Go modules\n")
	const offline = lacks + `echo "a.go:1:2: dial: no network" >&2; echo "b.go:1:2: dial: no network" >&2; exit 1`
	out, err = makefile(t, offline, "test", "RACE=off")
	require.Error(t, err)
	require.Contains(t, out, "\na.go:1:2: dial: no network\nmake: Go can't get modules; they come from GOPROXY=there, and go to there\n")
	require.NotContains(t, out, "b.go")
	out, err = makefile(t, offline, "modules")
	require.NoError(t, err, out)
	out, err = makefile(t, "", "modules", "GO=no-such-go")
	require.Error(t, err)
	require.Contains(t, out, "make: there is no no-such-go command; install Go from https://go.dev/dl\n")
}

func TestMakeRuns(t *testing.T) {
	for set, want := range map[string]string{"": "local", "auto": "local", "containers": "containers"} {
		out, err := makefile(t, "", "-n", "run-tests", "FENCELAB_TESTBED="+set)
		require.NoError(t, err, out)
		require.Contains(t, out, "servers: "+want+"\"", "%q", set)
	}
	// Root may use another user's clone, in which git refuses to answer go build.
	out, err := makefile(t, "", "-n", "run-tests", "bin/minidyn")
	require.NoError(t, err, out)
	require.Equal(t, 2, strings.Count(out, "go build "), out)
	require.Equal(t, 2, strings.Count(out, " -buildvcs=false "), out)
}

func TestSetupOff(t *testing.T) {
	for _, off := range []string{"SETUP=off", "FENCELAB_TESTBED=external", "FENCELAB_TESTBED=embedded"} {
		m := newMachine(t)
		require.Empty(t, m.setup(0, off))
		require.NoDirExists(t, filepath.Join(m.root, "bin"))
	}
}

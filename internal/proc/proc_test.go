//go:build unix

package proc_test

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/faults"
	"github.com/fencelab/fencelab/internal/proc"
	"github.com/fencelab/fencelab/internal/testmain"
)

// role makes the test binary a child. All children have the file lifeline open, so it closes when the last one is gone.
const (
	role     = "PROC_TEST_ROLE"
	lifeline = 3

	waits       = "waits"        // echoes until its input ends
	sleeps      = "sleeps"       // until it is killed
	starts      = "starts"       // starts a sleeper with package proc, and sleeps
	startsPlain = "starts-plain" // starts a plain sleeper, and sleeps
	leaves      = "leaves"       // starts a plain sleeper, and ends with its input
)

func TestMain(m *testing.M) {
	switch os.Getenv(role) {
	case "":
		testmain.Run(m)
	case starts:
		if _, err := proc.Start(command(sleeps, os.NewFile(lifeline, "lifeline"))); err != nil {
			panic(err)
		}
	case startsPlain, leaves:
		if err := command(sleeps, os.NewFile(lifeline, "lifeline")).Start(); err != nil {
			panic(err)
		}
	}
	fmt.Println("ready")
	for os.Getenv(role) != waits && os.Getenv(role) != leaves {
		time.Sleep(time.Hour)
	}
	in := bufio.NewScanner(os.Stdin)
	for in.Scan() {
		fmt.Println("got", in.Text())
	}
	os.Exit(3)
}

func command(what string, life *os.File) *exec.Cmd {
	self, err := os.Executable()
	if err != nil {
		panic(err)
	}
	cmd := exec.Command(self) //nolint:noctx // ended by Kill, or with its parent
	cmd.Env = append(os.Environ(), role+"="+what, "GORACE=atexit_sleep_ms=0")
	cmd.ExtraFiles = []*os.File{life}
	cmd.Stderr = os.Stderr
	return cmd
}

type child struct {
	*proc.Child
	life io.Reader
	in   io.WriteCloser
	out  *bufio.Scanner
}

func start(t *testing.T, what string) *child {
	t.Helper()
	r, w, err := os.Pipe()
	require.NoError(t, err)
	inR, inW, err := os.Pipe()
	require.NoError(t, err)
	outR, outW, err := os.Pipe()
	require.NoError(t, err)
	cmd := command(what, w)
	cmd.Stdin, cmd.Stdout = inR, outW
	c, err := proc.Start(cmd)
	require.NoError(t, err)
	for _, f := range []*os.File{w, inR, outW} {
		require.NoError(t, f.Close())
	}
	t.Cleanup(func() {
		require.NoError(t, c.Kill())
		for _, f := range []*os.File{r, inW, outR} {
			_ = f.Close()
		}
	})
	ch := &child{c, r, inW, bufio.NewScanner(outR)}
	require.True(t, ch.out.Scan())
	require.Equal(t, "ready", ch.out.Text())
	return ch
}

func (c *child) requireGone(t *testing.T) {
	t.Helper()
	b, err := io.ReadAll(c.life)
	require.NoError(t, err)
	require.Empty(t, b)
}

func signalOf(t *testing.T, err error) syscall.Signal {
	t.Helper()
	var exit *exec.ExitError
	require.ErrorAs(t, err, &exit)
	return exit.Sys().(syscall.WaitStatus).Signal()
}

func TestExit(t *testing.T) {
	c := start(t, waits)
	select {
	case <-c.Exited():
		t.Fatal("it has exited")
	default:
	}
	group, err := syscall.Getpgid(c.PID)
	require.NoError(t, err)
	require.Equal(t, c.PID, group, "a group of its own, out of reach of Ctrl-C")
	require.NoError(t, c.in.(*os.File).Close())
	<-c.Exited()
	var exit *exec.ExitError
	require.ErrorAs(t, c.Wait(), &exit)
	require.Equal(t, 3, exit.ExitCode())
	require.NoError(t, c.Kill(), "it is gone already")
	require.ErrorIs(t, syscall.Kill(c.PID, 0), syscall.ESRCH, "reaped")
}

func TestKillReachesTheGroup(t *testing.T) {
	leader := start(t, waits)
	cmd := command(sleeps, nil)
	cmd.ExtraFiles, cmd.SysProcAttr = nil, &syscall.SysProcAttr{Pgid: leader.PID}
	c, err := proc.Start(cmd)
	require.NoError(t, err)
	require.NoError(t, c.Kill())
	<-leader.Exited()
	require.Equal(t, syscall.SIGKILL, signalOf(t, leader.Wait()))
}

func TestKillStopped(t *testing.T) {
	c := start(t, waits)
	_, err := faults.Pause(t.Context(), c.PID)
	require.NoError(t, err)
	require.NoError(t, c.Kill())
	require.Equal(t, syscall.SIGKILL, signalOf(t, c.Wait()))
	c.requireGone(t)
}

func TestKillReachesGrandchildren(t *testing.T) {
	c := start(t, startsPlain)
	require.NoError(t, c.Kill())
	c.requireGone(t)
}

func TestOutputIsReadToTheEnd(t *testing.T) {
	r, w, err := os.Pipe()
	require.NoError(t, err)
	cmd := command(waits, w)
	var out strings.Builder
	cmd.Stdin, cmd.Stdout = strings.NewReader("one\ntwo\n"), &out
	c, err := proc.Start(cmd)
	require.NoError(t, err)
	<-c.Exited()
	require.Equal(t, "ready\ngot one\ngot two\n", out.String())
	require.NoError(t, r.Close())
	require.NoError(t, w.Close())
}

func TestStartFails(t *testing.T) {
	_, err := proc.Start(exec.CommandContext(t.Context(), "/no/such/program"))
	require.ErrorIs(t, err, os.ErrNotExist)
	require.ErrorContains(t, err, "proc: ")
}

func TestChildOutlivesThread(t *testing.T) {
	var c *child
	awaitThreadEnd(t, onThread(func() { c = start(t, waits) }))
	for i := range 3 {
		_, err := fmt.Fprintln(c.in, i)
		require.NoError(t, err)
		require.True(t, c.out.Scan(), "the child is gone")
		require.Equal(t, "got "+strconv.Itoa(i), c.out.Text())
	}
}

// onThread calls f on a thread that ends afterwards, and returns its id.
func onThread(f func()) (tid int) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
		if tid = gettid(); tid != os.Getpid() {
			f()
			return
		}
		tid = onThread(f) // the first thread never ends; while it is locked, onThread gets another
		runtime.UnlockOSThread()
	}()
	<-done
	return tid
}

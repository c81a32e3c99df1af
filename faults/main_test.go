package faults_test

import (
	"context"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/internal/testmain"
)

// tickerFile makes the test binary a ticker: a process that does nothing but count in the file named by this variable.
const tickerFile = "FAULTS_TEST_TICKER"

func TestMain(m *testing.M) {
	if path := os.Getenv(tickerFile); path != "" {
		if err := tick(path); err != nil {
			panic(err)
		}
		return
	}
	testmain.Run(m)
}

// ticks are a ticker's counters: two threads that live on, and threads that are born, tick once and die.
type ticks [3]atomic.Uint64

func mapTicks(path string) (*ticks, []byte, error) {
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return nil, nil, err
	}
	mem, err := syscall.Mmap(int(f.Fd()), 0, os.Getpagesize(), syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_SHARED)
	if err := errors.Join(err, f.Close()); err != nil {
		return nil, nil, err
	}
	return (*ticks)(unsafe.Pointer(unsafe.SliceData(mem))), mem, nil
}

// tick counts until standard input ends.
func tick(path string) error {
	counters, _, err := mapTicks(path)
	if err != nil {
		return err
	}
	runtime.GOMAXPROCS(4)
	for i := range 2 {
		go func() {
			runtime.LockOSThread()
			for {
				counters[i].Add(1)
			}
		}()
	}
	go func() {
		for {
			ended := make(chan struct{})
			go func() {
				defer close(ended)
				runtime.LockOSThread() // and end with it locked: the thread ends too
				counters[2].Add(1)
			}()
			<-ended
		}
	}()
	_, err = io.Copy(io.Discard, os.Stdin)
	return err
}

type ticker struct {
	cmd      *exec.Cmd
	counters *ticks
}

// startTicker returns a process of which every counter moves.
func startTicker(t *testing.T) *ticker {
	t.Helper()
	path := filepath.Join(t.TempDir(), "ticks")
	require.NoError(t, os.WriteFile(path, make([]byte, os.Getpagesize()), 0o600))
	counters, mem, err := mapTicks(path)
	require.NoError(t, err)
	t.Cleanup(func() { _ = syscall.Munmap(mem) })

	exe, err := os.Executable()
	require.NoError(t, err)
	cmd := exec.CommandContext(context.Background(), exe) // ended by reap
	cmd.Env = append(os.Environ(), tickerFile+"="+path)
	cmd.Stderr = os.Stderr
	cmd.SysProcAttr = dieWithParent()
	stdin, err := cmd.StdinPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	tk := &ticker{cmd, counters}
	t.Cleanup(func() {
		_ = stdin.Close()
		tk.reap()
	})
	tk.awaitTicks(t, 1)
	return tk
}

func (tk *ticker) pid() int { return tk.cmd.Process.Pid }

// reap ends the process, whatever state it is in, and collects it.
func (tk *ticker) reap() {
	_ = tk.cmd.Process.Kill()
	_ = tk.cmd.Wait()
}

func (tk *ticker) count() (n [3]uint64) {
	for i := range n {
		n[i] = tk.counters[i].Load()
	}
	return n
}

// awaitTicks waits until every counter has moved on by n.
func (tk *ticker) awaitTicks(t *testing.T, n uint64) {
	t.Helper()
	start := tk.count()
	await(t, "ticks", func() bool {
		for i, now := range tk.count() {
			if now < start[i]+n {
				return false
			}
		}
		return true
	})
}

// await waits until ok holds; there is no event for what it is used for.
func await(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(30 * time.Second); !ok(); time.Sleep(100 * time.Microsecond) {
		if time.Now().After(deadline) {
			t.Fatalf("no %s within 30 s", what)
		}
	}
}

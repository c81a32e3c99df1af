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

	"github.com/fencelab/fencelab/faults"
	"github.com/fencelab/fencelab/internal/testmain"
)

// tickerFile names a file, and makes the test binary a ticker: a process that counts in it.
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

// ticks are a ticker's counters: of two threads that live on, and of threads that tick once and end.
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
				runtime.LockOSThread() // a locked thread ends with its goroutine
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

func startTicker(t *testing.T) *ticker {
	t.Helper()
	path := filepath.Join(t.TempDir(), "ticks")
	require.NoError(t, os.WriteFile(path, make([]byte, os.Getpagesize()), 0o600))
	counters, mem, err := mapTicks(path)
	require.NoError(t, err)
	t.Cleanup(func() { _ = syscall.Munmap(mem) })

	exe, err := os.Executable()
	require.NoError(t, err)
	cmd := exec.CommandContext(context.Background(), exe)
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

// soon returns a context that ends before the tests' own timeout: a fault that never takes effect fails one test.
func soon(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	t.Cleanup(cancel)
	return ctx
}

func await(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(30 * time.Second); !ok(); time.Sleep(100 * time.Microsecond) {
		if time.Now().After(deadline) {
			t.Fatalf("no %s within 30 s", what)
		}
	}
}

func inForce(t *testing.T) func(faults.Heal, error) faults.Heal {
	t.Helper()
	return func(heal faults.Heal, err error) faults.Heal {
		t.Helper()
		require.NoError(t, err)
		return heal
	}
}

func requireBusy(t *testing.T) func(faults.Heal, error) {
	t.Helper()
	return func(_ faults.Heal, err error) {
		t.Helper()
		require.ErrorContains(t, err, "another fault")
	}
}

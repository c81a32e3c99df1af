// Package proc starts child processes that do not outlive their parent.
package proc

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"sync"
	"syscall"
	"time"
)

// Child is a running process that leads its own process group, out of reach of the terminal's Ctrl-C. On Linux the kernel kills
// it when the parent is killed, and the rest of its group is killed when it exits.
type Child struct {
	PID    int
	group  int
	exited chan struct{}
	err    error

	mu    sync.Mutex // while held, the process isn't reaped
	ended bool       // it may be reaped; set in time only on Linux
}

// Start starts cmd, in the process group of cmd.SysProcAttr.Pgid if set. The functions then are called after its end, before
// Exited is closed.
func Start(cmd *exec.Cmd, then ...func()) (*Child, error) {
	attr := sysProcAttr()
	if cmd.SysProcAttr != nil {
		attr.Pgid = cmd.SysProcAttr.Pgid
	}
	cmd.SysProcAttr = attr
	c := &Child{exited: make(chan struct{})}
	started := make(chan error)
	go func() {
		// Linux sends the parent-death signal when the *thread* that forked ends.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := cmd.Start()
		started <- err
		if err != nil {
			return
		}
		if pid := cmd.Process.Pid; awaitExit(pid) {
			c.mu.Lock()
			c.ended = true
			c.mu.Unlock()
			if attr.Pgid == 0 {
				_ = syscall.Kill(-pid, syscall.SIGKILL)
			}
		}
		if cmd.WaitDelay == 0 {
			cmd.WaitDelay = 5 * time.Second // for output that a process of another group holds open
		}
		if c.err = cmd.Wait(); errors.Is(c.err, exec.ErrWaitDelay) {
			c.err = nil
		}
		for _, f := range then {
			f()
		}
		close(c.exited)
	}()
	if err := <-started; err != nil {
		return nil, fmt.Errorf("proc: %w", err)
	}
	c.PID = cmd.Process.Pid
	c.group = cmp.Or(attr.Pgid, c.PID)
	return c, nil
}

// Exited is closed when the process is reaped and its output read, unless a process of another group holds it open.
func (c *Child) Exited() <-chan struct{} { return c.exited }

// Wait waits for the process like [exec.Cmd.Wait].
func (c *Child) Wait() error {
	<-c.exited
	return c.err
}

// With calls f with the PID, which on Linux isn't reused meanwhile. After the process's end it returns os.ErrProcessDone.
func (c *Child) With(f func(pid int) error) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	select {
	case <-c.exited:
		return os.ErrProcessDone
	default:
	}
	if c.ended {
		return os.ErrProcessDone
	}
	return f(c.PID)
}

// Kill kills the process group, even if stopped, and waits until the process has exited.
func (c *Child) Kill() error {
	err := c.With(func(int) error { return syscall.Kill(-c.group, syscall.SIGKILL) })
	if err == nil || errors.Is(err, syscall.ESRCH) || errors.Is(err, os.ErrProcessDone) {
		<-c.exited
		return nil
	}
	select { // Darwin doesn't permit signals to a zombie
	case <-c.exited:
		return nil
	case <-time.After(time.Second):
		return fmt.Errorf("proc: kill process group %d: %w", c.group, err)
	}
}

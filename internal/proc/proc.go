// Package proc starts child processes that do not outlive their parent.
package proc

import (
	"cmp"
	"errors"
	"fmt"
	"os/exec"
	"runtime"
	"syscall"
	"time"
)

// Child is a running process that leads its own process group, out of reach of the terminal's Ctrl-C. On Linux the kernel kills it
// when the parent is killed, and the rest of its group is killed when it exits.
type Child struct {
	PID    int
	group  int
	exited chan struct{}
	err    error
}

// Start starts cmd. If cmd.SysProcAttr has a Pgid, the child joins that process group.
func Start(cmd *exec.Cmd) (*Child, error) {
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
		if pid := cmd.Process.Pid; attr.Pgid == 0 && awaitExit(pid) {
			_ = syscall.Kill(-pid, syscall.SIGKILL)
		}
		if cmd.WaitDelay == 0 {
			cmd.WaitDelay = 5 * time.Second // for output that a process of another group holds open
		}
		if c.err = cmd.Wait(); errors.Is(c.err, exec.ErrWaitDelay) {
			c.err = nil
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

// Kill kills the process group, even if stopped, and waits until the process is gone.
func (c *Child) Kill() error {
	select {
	case <-c.exited:
		return nil
	default:
	}
	err := syscall.Kill(-c.group, syscall.SIGKILL)
	if err == nil || errors.Is(err, syscall.ESRCH) {
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

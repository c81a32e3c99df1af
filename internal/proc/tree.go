package proc

import (
	"fmt"
	"os/exec"
	"runtime"
	"syscall"
	"time"
)

// Tree is a command with all its descendants, also orphans and those with another process group or session; on other systems
// than Linux it is the command's process group.
type Tree struct {
	command int
	group   int // of the caller, which the command begins in on Linux
	exited  chan syscall.WaitStatus
	gone    chan struct{}
}

// StartTree starts cmd, whose files are *os.File. The process must lead its group and have no other children, since the tree's
// orphans become its own. On Linux the command is killed when the calling goroutine ends.
func StartTree(cmd *exec.Cmd) (*Tree, error) {
	runtime.LockOSThread() // Linux sends the parent-death signal when the *thread* that forked ends
	err := adoptOrphans()
	if err == nil {
		cmd.SysProcAttr = treeAttr()
		err = cmd.Start()
	}
	if err != nil {
		return nil, fmt.Errorf("proc: %w", err)
	}
	t := &Tree{cmd.Process.Pid, syscall.Getpgrp(), make(chan syscall.WaitStatus, 1), make(chan struct{})}
	go t.reap()
	return t, nil
}

func (t *Tree) reap() {
	for {
		var status syscall.WaitStatus
		switch pid, err := syscall.Wait4(-1, &status, 0, nil); {
		case err == nil && pid == t.command:
			t.exited <- status
		case err != nil && err != syscall.EINTR: // ECHILD, and then none can appear any more
			close(t.gone)
			return
		}
	}
}

// Exited receives the command's status.
func (t *Tree) Exited() <-chan syscall.WaitStatus { return t.exited }

// Kill kills all processes and reports whether they are gone within the limit. If not, it kills the caller's first group: the
// caller, too, if it couldn't leave.
func (t *Tree) Kill(limit time.Duration) bool {
	for began := time.Now(); !t.goneWithin(time.Millisecond); {
		if time.Since(began) > limit {
			_ = syscall.Kill(-t.group, syscall.SIGKILL)
			return false
		}
		t.Signal(syscall.SIGKILL)
	}
	return true
}

func (t *Tree) goneWithin(d time.Duration) bool {
	select {
	case <-t.gone:
		if !alive(t.command) {
			return true
		}
		<-time.After(d)
	case <-time.After(d):
	}
	return false
}

// Process is a process of this machine, which may have ended.
type Process struct{ PID, Parent, Group int }

// Descendants returns parents before their children. With an error some may be missing.
func Descendants(root int) (found []Process, err error) {
	children, err := children()
	seen := map[int]bool{root: true} // a pid may have been used again meanwhile
	for next := children[root]; len(next) > 0; next = next[1:] {
		if p := next[0]; !seen[p.PID] {
			seen[p.PID] = true
			found = append(found, p)
			next = append(next, children[p.PID]...)
		}
	}
	return found, err
}

// signal also continues stopped processes, so that they get the signal.
func signal(to int, s syscall.Signal) {
	_ = syscall.Kill(to, s)
	_ = syscall.Kill(to, syscall.SIGCONT)
}

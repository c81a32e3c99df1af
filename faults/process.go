package faults

import (
	"context"
	"errors"
	"fmt"
	"os"
	"syscall"
	"time"
)

// Pause freezes the process pid with SIGSTOP. In force means that the kernel reports every thread as stopped. The heal sends
// SIGCONT and returns when no thread is stopped; if the process has died, the error matches os.ErrProcessDone. On Linux it never
// signals a later process with the same pid.
//
// Pause refuses, without a signal: a pid below 2, the calling process, a dead process or zombie (os.ErrProcessDone), another
// user's (os.ErrPermission), and one that is already stopped.
func Pause(ctx context.Context, pid int) (Heal, error) {
	p, err := find(ctx, pid)
	if err != nil {
		return nil, fmt.Errorf("faults: pause process %d: %w", pid, err)
	}
	if err := p.stop(ctx); err != nil {
		p.release()
		return nil, fmt.Errorf("faults: pause process %d: %w", pid, err)
	}
	return Once(func(ctx context.Context) error {
		if err := p.resume(ctx); err != nil {
			return fmt.Errorf("faults: resume process %d: %w", pid, err)
		}
		p.release()
		return nil
	}), nil
}

func (p *process) stop(ctx context.Context) error {
	t, err := p.threads(ctx)
	if err != nil {
		return err
	}
	if t.stopped > 0 {
		return errors.New("it is already stopped")
	}
	if err := p.handle.Signal(syscall.SIGSTOP); err != nil {
		return err
	}
	if err := p.wait(ctx, threads.allStopped); err != nil {
		return errors.Join(err, p.handle.Signal(syscall.SIGCONT))
	}
	return nil
}

func (p *process) resume(ctx context.Context) error {
	if err := p.handle.Signal(syscall.SIGCONT); err != nil {
		return err
	}
	return p.wait(ctx, threads.running)
}

// Kill kills the process pid with SIGKILL. In force means that no thread runs, and that its files, sockets and locks are closed;
// a zombie may remain. It refuses the pids that [Pause] refuses, except a stopped process's.
func Kill(ctx context.Context, pid int) error {
	p, err := find(ctx, pid)
	if err != nil {
		return fmt.Errorf("faults: kill process %d: %w", pid, err)
	}
	defer p.release()
	if err := p.handle.Signal(syscall.SIGKILL); err != nil {
		return fmt.Errorf("faults: kill process %d: %w", pid, err)
	}
	if err := p.wait(ctx, threads.exited); err != nil {
		return fmt.Errorf("faults: kill process %d: %w", pid, err)
	}
	return nil
}

// pollEvery is the interval of reading a process's state: the kernel reports stops only to the parent.
const pollEvery = 500 * time.Microsecond

// process is a target. On Linux its handle is a pidfd.
type process struct {
	pid    int
	handle *os.Process
}

// threads counts a process's threads by state; all 0 once it has exited.
type threads struct {
	total   int
	stopped int // by a signal
	dead    int // 1 if the main thread has ended, until the process is reaped
}

func (t threads) exited() bool     { return t.dead == t.total }
func (t threads) allStopped() bool { return !t.exited() && t.stopped+t.dead == t.total }
func (t threads) running() bool    { return !t.exited() && t.stopped == 0 }

func find(ctx context.Context, pid int) (*process, error) {
	switch {
	case ctx.Err() != nil:
		return nil, context.Cause(ctx)
	case pid < 2:
		return nil, errors.New("a pid below 2 is init or a process group")
	case pid == os.Getpid():
		return nil, errors.New("it is this process")
	}
	handle, err := os.FindProcess(pid)
	if err != nil {
		return nil, err
	}
	p := &process{pid, handle}
	t, err := p.threads(ctx)
	if err == nil && t.exited() {
		err = os.ErrProcessDone
	}
	if err != nil {
		p.release()
		return nil, err
	}
	return p, nil
}

func (p *process) release() { _ = p.handle.Release() }

func (p *process) threads(ctx context.Context) (threads, error) {
	t, err := readThreads(ctx, p.pid)
	if err != nil {
		return threads{}, err
	}
	// Checked after reading: the pid can't be reused until the handle's process is reaped.
	switch err := p.handle.Signal(syscall.Signal(0)); {
	case errors.Is(err, os.ErrProcessDone):
		return threads{}, nil
	case err != nil:
		return threads{}, err
	}
	return t, nil
}

// wait polls the process until ok, or returns os.ErrProcessDone.
func (p *process) wait(ctx context.Context, ok func(threads) bool) error {
	tick := time.NewTicker(pollEvery)
	defer tick.Stop()
	for {
		t, err := p.threads(ctx)
		switch {
		case err != nil:
			return err
		case ok(t):
			return nil
		case t.exited():
			return os.ErrProcessDone
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-tick.C:
		}
	}
}

package faults

import (
	"context"
	"errors"
	"os"
	"syscall"
	"time"
)

// pollEvery is the interval of reading a process's state: the kernel reports stops only to the parent.
const pollEvery = 500 * time.Microsecond

// process is a target. On Linux its handle is a pidfd.
type process struct {
	pid    int
	handle *os.Process
}

// threads counts a process's threads by state; all 0 if it is gone.
type threads struct {
	total   int
	stopped int // by a signal
	dead    int // 1 if the main thread has ended, until the parent reaps the process
}

func (t threads) gone() bool   { return t.dead == t.total }
func (t threads) halted() bool { return !t.gone() && t.stopped+t.dead == t.total }
func (t threads) going() bool  { return !t.gone() && t.stopped == 0 }

func find(ctx context.Context, pid int) (*process, error) {
	switch {
	case ctx.Err() != nil:
		return nil, context.Cause(ctx)
	case pid < 2:
		return nil, errors.New("a pid below 2 names init or a group of processes")
	case pid == os.Getpid():
		return nil, errors.New("it is the calling process")
	}
	handle, err := os.FindProcess(pid)
	if err != nil {
		return nil, err
	}
	p := &process{pid, handle}
	t, err := p.threads(ctx)
	if err == nil && t.gone() {
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
	// Checked after reading: until the handle's process is reaped, its pid can't be reused.
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
		case t.gone():
			return os.ErrProcessDone
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-tick.C:
		}
	}
}

package faults

import (
	"context"
	"errors"
	"os"
	"syscall"
	"time"
)

// pollEvery is how often a process's state is read. The kernel tells of stops only through wait, and only the parent.
const pollEvery = 500 * time.Microsecond

// process is a target. On Linux its handle holds a pidfd and never signals a later process with the same pid.
type process struct {
	pid    int
	handle *os.Process
}

// threads counts a process's threads by state. A process that is gone has none.
type threads struct {
	total   int
	stopped int // by a signal
	dead    int // 1 if the first has ended, which stays until the parent collects the process
}

func (t threads) gone() bool   { return t.dead == t.total }
func (t threads) halted() bool { return !t.gone() && t.stopped+t.dead == t.total }
func (t threads) going() bool  { return !t.gone() && t.stopped == 0 }

// find returns the process pid if it is alive and may be signalled.
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

// release gives the handle back; that can't fail.
func (p *process) release() { _ = p.handle.Release() }

// threads reads the process's state once.
func (p *process) threads(ctx context.Context) (threads, error) {
	t, err := readThreads(ctx, p.pid)
	if err != nil {
		return threads{}, err
	}
	// Afterwards: as long as the handle's process has not been reaped, its pid is its own.
	switch err := p.handle.Signal(syscall.Signal(0)); {
	case errors.Is(err, os.ErrProcessDone):
		return threads{}, nil
	case err != nil:
		return threads{}, err
	}
	return t, nil
}

// wait polls the process until ok holds. It returns os.ErrProcessDone if the process is gone instead.
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

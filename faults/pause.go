package faults

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"syscall"
)

// Pause freezes the process pid by SIGSTOP. In force means that the kernel reports every thread of it as stopped: none
// has run since, and none will before the heal.
//
// The heal, SIGCONT, is over when no thread is stopped any more. It reaches the process that was paused even if pid
// has been given to another one since (on Linux, through a pidfd; elsewhere the operating system offers no way). If
// the process has died under the pause, the heal's error matches os.ErrProcessDone.
//
// Pause refuses, with an error and without a signal: a pid below 2 (those name init or a group of processes), the
// calling process, a process that is gone or only waits for its parent to collect it (os.ErrProcessDone), one that
// belongs to somebody else (os.ErrPermission), and one that is stopped already, for that stop is not Pause's to end.
func Pause(ctx context.Context, pid int) (Heal, error) {
	p, err := find(ctx, pid)
	if err != nil {
		return nil, fmt.Errorf("faults: pause process %d: %w", pid, err)
	}
	if err := p.stop(ctx); err != nil {
		p.release()
		return nil, fmt.Errorf("faults: pause process %d: %w", pid, err)
	}
	var mu sync.Mutex
	resumed := false
	return func(ctx context.Context) error {
		mu.Lock()
		defer mu.Unlock()
		if resumed {
			return nil
		}
		if err := p.resume(ctx); err != nil {
			return fmt.Errorf("faults: resume process %d: %w", pid, err)
		}
		resumed = true
		p.release()
		return nil
	}, nil
}

func (p *process) stop(ctx context.Context) error {
	t, err := p.threads(ctx)
	if err != nil {
		return err
	}
	if t.stopped > 0 {
		return errors.New("it is stopped already")
	}
	if err := p.handle.Signal(syscall.SIGSTOP); err != nil {
		return err
	}
	if err := p.wait(ctx, threads.halted); err != nil {
		return errors.Join(err, p.handle.Signal(syscall.SIGCONT))
	}
	return nil
}

func (p *process) resume(ctx context.Context) error {
	if err := p.handle.Signal(syscall.SIGCONT); err != nil {
		return err
	}
	return p.wait(ctx, threads.going)
}

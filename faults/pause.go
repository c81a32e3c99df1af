package faults

import (
	"context"
	"errors"
	"fmt"
	"syscall"
)

// Pause freezes the process pid with SIGSTOP. In force means that the kernel reports every thread as stopped. The heal sends
// SIGCONT and returns when no thread is stopped; if the process has died, the error matches os.ErrProcessDone. On Linux it never
// signals a later process with the same pid.
//
// Pause refuses, without a signal: a pid below 2, the calling process, a dead process or zombie (os.ErrProcessDone), another user's
// (os.ErrPermission), and one that is already stopped.
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

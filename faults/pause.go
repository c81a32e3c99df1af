package faults

import (
	"context"
	"errors"
	"fmt"
	"syscall"
)

// Pause freezes the process pid by SIGSTOP. In force means that the kernel reports every thread of it as stopped.
//
// The heal, SIGCONT, is over when no thread is stopped. On Linux it never reaches another process that was given pid since. If
// the process has died under the pause, its error matches os.ErrProcessDone.
//
// Pause refuses, without a signal: a pid below 2, the calling process, a process that is gone or a zombie (os.ErrProcessDone),
// somebody else's (os.ErrPermission), and one that is stopped already, for that stop is not Pause's to end.
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

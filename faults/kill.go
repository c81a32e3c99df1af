package faults

import (
	"context"
	"fmt"
	"syscall"
)

// Kill ends the process pid by SIGKILL, whether it runs or is paused. In force means that the process is gone, or that
// nothing but its exit status is left for its parent to collect: no thread runs, and its files, sockets and locks are
// closed. There is no heal; starting the process again is up to the caller.
//
// Kill refuses the same pids as [Pause], except that a stopped process is killed.
func Kill(ctx context.Context, pid int) error {
	p, err := find(ctx, pid)
	if err != nil {
		return fmt.Errorf("faults: kill process %d: %w", pid, err)
	}
	defer p.release()
	if err := p.handle.Signal(syscall.SIGKILL); err != nil {
		return fmt.Errorf("faults: kill process %d: %w", pid, err)
	}
	if err := p.wait(ctx, threads.gone); err != nil {
		return fmt.Errorf("faults: kill process %d: %w", pid, err)
	}
	return nil
}

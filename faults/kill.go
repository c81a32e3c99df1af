package faults

import (
	"context"
	"fmt"
	"syscall"
)

// Kill kills the process pid with SIGKILL, even if it is stopped. In force means that no thread runs, and that its files, sockets
// and locks are closed; a zombie may remain. It refuses the pids that [Pause] refuses, but not a stopped process.
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

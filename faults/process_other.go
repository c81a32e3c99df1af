//go:build unix && !linux

package faults

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"strconv"
)

// readThreads runs ps, which reports a process's threads as one.
func readThreads(ctx context.Context, pid int) (threads, error) {
	state, err := exec.CommandContext(ctx, "ps", "-o", "state=", "-p", strconv.Itoa(pid)).Output()
	if _, failed := errors.AsType[*exec.ExitError](err); failed && ctx.Err() == nil && len(state) == 0 {
		return threads{}, nil
	}
	if err != nil {
		return threads{}, fmt.Errorf("ps: %w", err)
	}
	t := threads{total: 1}
	switch {
	case len(state) == 0:
		t.total = 0
	case state[0] == 'T':
		t.stopped = 1
	case state[0] == 'Z':
		t.dead = 1
	}
	return t, nil
}

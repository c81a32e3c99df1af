package faults

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"strconv"

	"github.com/fencelab/fencelab/internal/proc"
)

// readThreads reads every thread's state. A listing taken while threads end may miss others, so the total is the kernel's count,
// read afterwards: if as many were seen stopped, none was missed.
func readThreads(_ context.Context, pid int) (threads, error) {
	process := fmt.Sprintf("/proc/%d", pid)
	entries, err := proc.ReadDir(filepath.Join(process, "task"))
	if errors.Is(err, fs.ErrNotExist) {
		return threads{}, nil
	}
	if err != nil {
		return threads{}, err
	}
	var t threads
	for _, e := range entries {
		stat, err := proc.Stat(filepath.Join(process, "task", e.Name(), "stat"))
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return threads{}, err
		}
		if stat[proc.State] == "T" {
			t.stopped++
		}
	}
	first, err := proc.Stat(filepath.Join(process, "stat"))
	if errors.Is(err, fs.ErrNotExist) {
		return threads{}, nil
	}
	if err != nil {
		return threads{}, err
	}
	if first[proc.State] == "Z" || first[proc.State] == "X" {
		t.dead = 1
	}
	t.total, err = strconv.Atoi(first[proc.Threads])
	return t, err
}

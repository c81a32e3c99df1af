package faults

import (
	"context"

	"github.com/prometheus/procfs"

	"github.com/fencelab/fencelab/internal/proc"
)

// readThreads reads every thread's state. A listing taken while threads end may miss others, so the total is the kernel's count,
// read afterwards: if as many were seen stopped, none was missed.
func readThreads(_ context.Context, pid int) (threads, error) {
	all, err := procfs.AllThreads(pid)
	if err != nil {
		return threads{}, unlessEnded(err)
	}
	var t threads
	for _, thread := range all {
		switch stat, err := thread.Stat(); {
		case err != nil && !proc.Ended(err):
			return threads{}, err
		case err == nil && stat.State == "T":
			t.stopped++
		}
	}
	process, err := procfs.NewProc(pid)
	if err != nil {
		return threads{}, unlessEnded(err)
	}
	stat, err := process.Stat()
	if err != nil {
		return threads{}, unlessEnded(err)
	}
	if stat.State == "Z" || stat.State == "X" {
		t.dead = 1
	}
	t.total = stat.NumThreads
	return t, nil
}

func unlessEnded(err error) error {
	if proc.Ended(err) {
		return nil
	}
	return err
}

package faults

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
)

// readThreads looks at every thread of pid: the state in /proc/PID/stat is that of the first thread alone, which may
// be stopped, or dead, while others still run.
func readThreads(_ context.Context, pid int) (threads, error) {
	tasks := fmt.Sprintf("/proc/%d/task", pid)
	entries, err := os.ReadDir(tasks)
	if ended(err) {
		return threads{}, nil
	}
	if err != nil {
		return threads{}, err
	}
	var t threads
	for _, e := range entries {
		stat, err := os.ReadFile(filepath.Join(tasks, e.Name(), "stat"))
		if ended(err) {
			continue
		}
		if err != nil {
			return threads{}, err
		}
		// proc_pid_stat(5): "pid (comm) state ...", where comm may hold spaces and parentheses.
		i := bytes.LastIndexByte(stat, ')') + 2
		if i >= len(stat) {
			return threads{}, fmt.Errorf("%s/%s/stat: no state in %q", tasks, e.Name(), stat)
		}
		t.total++
		switch stat[i] {
		case 'T':
			t.stopped++
		case 'Z', 'X':
			t.dead++
		}
	}
	return t, nil
}

// ended tells that a thread ended before its file was opened (ENOENT) or while it was read (ESRCH).
func ended(err error) bool {
	return errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ESRCH)
}

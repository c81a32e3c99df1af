package faults

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"syscall"
)

// readThreads looks at every thread of pid: the state in /proc/PID/stat is that of the first thread alone, which may
// be stopped, or dead, while others still run.
//
// A list of threads of which some end meanwhile may lack others, so the kernel's count, taken afterwards, is the one that
// counts: if as many were seen stopped as there are then, no thread was missed, for what is stopped stays so and can
// start no other.
func readThreads(_ context.Context, pid int) (threads, error) {
	process := fmt.Sprintf("/proc/%d", pid)
	entries, err := os.ReadDir(filepath.Join(process, "task"))
	if ended(err) {
		return threads{}, nil
	}
	if err != nil {
		return threads{}, err
	}
	var t threads
	for _, e := range entries {
		stat, err := readStat(filepath.Join(process, "task", e.Name(), "stat"))
		if ended(err) {
			continue
		}
		if err != nil {
			return threads{}, err
		}
		if stat.state == 'T' {
			t.stopped++
		}
	}
	first, err := readStat(filepath.Join(process, "stat"))
	if ended(err) {
		return threads{}, nil
	}
	if err != nil {
		return threads{}, err
	}
	t.total = first.threads
	if first.state == 'Z' || first.state == 'X' {
		t.dead = 1
	}
	return t, nil
}

// stat is what is needed of proc_pid_stat(5).
type stat struct {
	state   byte // field 3
	threads int  // field 20: of the whole process
}

func readStat(path string) (stat, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return stat{}, err
	}
	// "pid (comm) state ...", where comm may hold spaces and parentheses.
	fields := bytes.Fields(b[bytes.LastIndexByte(b, ')')+1:])
	if len(fields) < 18 {
		return stat{}, fmt.Errorf("%s: too short: %q", path, b)
	}
	threads, err := strconv.Atoi(string(fields[17]))
	if err != nil {
		return stat{}, fmt.Errorf("%s: %w", path, err)
	}
	return stat{fields[0][0], threads}, nil
}

// ended tells that a thread ended before its file was opened (ENOENT) or while it was read (ESRCH).
func ended(err error) bool {
	return errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ESRCH)
}

package testbed

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"syscall"

	"github.com/fencelab/fencelab/internal/proc"
)

// A child is a server that runs as a process of its own, in a temporary directory of its own.
type child struct {
	*proc.Child
	dir string
}

// Files in a child's directory.
const (
	logFile   = "log"        // what it prints
	ownerFile = "owner.json" // the process that started it
	childFile = "child.json" // the child itself
	dirPrefix = "fencelab-"
)

// spawn starts cmd as a child whose directory is dir, made by [MkdirTemp].
func spawn(dir string, cmd *exec.Cmd) (*child, error) {
	log, err := os.Create(filepath.Join(dir, logFile))
	if err != nil {
		return nil, fmt.Errorf("testbed: %w", err)
	}
	defer func() { _ = log.Close() }() // the child has its own descriptor

	cmd.Dir = dir
	cmd.Stdout, cmd.Stderr = log, log
	p, err := proc.Start(cmd)
	if err != nil {
		return nil, fmt.Errorf("testbed: %w", err)
	}
	it, err := ownerOf(p.PID)
	if err == nil {
		err = writeOwner(filepath.Join(dir, childFile), it)
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) { // one that has exited already needs no sweep
		return nil, errors.Join(err, p.Kill())
	}
	return &child{p, dir}, nil
}

// MkdirTemp makes a directory for temporary files. If the process is killed, the next call on the same machine, or the
// next start of a server, removes it.
func MkdirTemp(name string) (dir string, err error) {
	if err := sweepDirs(); err != nil {
		return "", err
	}
	me, err := ownerOf(os.Getpid())
	if err != nil {
		return "", err
	}
	dir, err = os.MkdirTemp("", dirPrefix+name+"-")
	if err != nil {
		return "", fmt.Errorf("testbed: %w", err)
	}
	if err := writeOwner(filepath.Join(dir, ownerFile), me); err != nil {
		return "", errors.Join(err, os.RemoveAll(dir))
	}
	return dir, nil
}

// log returns the end of what the child has printed.
func (c *child) log() string {
	b, err := os.ReadFile(filepath.Join(c.dir, logFile))
	if err != nil {
		return err.Error()
	}
	return tail(b)
}

// tail returns the last lines of an output, for an error message.
func tail(b []byte) string {
	const most = 2000
	b = bytes.TrimSpace(b)
	return string(b[max(0, len(b)-most):])
}

// sweepDirs ends, once, what processes that were killed have left behind in the temporary directory: servers (where
// no parent-death signal ends them) and directories.
var sweepDirs = sync.OnceValue(func() error {
	dirs, err := filepath.Glob(filepath.Join(os.TempDir(), dirPrefix+"*"))
	if err != nil {
		return fmt.Errorf("testbed: %w", err)
	}
	for _, dir := range dirs {
		// A directory that can't be read is another user's, or its owner has only just made it.
		parent, err := readOwner(filepath.Join(dir, ownerFile))
		if err != nil || !parent.gone() {
			continue
		}
		it, err := readOwner(filepath.Join(dir, childFile))
		if alive, _ := it.alive(); err == nil && alive {
			if err := syscall.Kill(-it.PID, syscall.SIGKILL); err != nil && !errors.Is(err, syscall.ESRCH) {
				return fmt.Errorf("testbed: kill the server that process %d left: %w", parent.PID, err)
			}
		}
		if err := os.RemoveAll(dir); err != nil {
			return fmt.Errorf("testbed: remove what process %d left: %w", parent.PID, err)
		}
	}
	return nil
})

func writeOwner(path string, o owner) error {
	b, err := json.Marshal(o)
	if err != nil {
		return fmt.Errorf("testbed: %w", err)
	}
	if err := os.WriteFile(path, b, 0o600); err != nil {
		return fmt.Errorf("testbed: %w", err)
	}
	return nil
}

func readOwner(path string) (o owner, err error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return o, err
	}
	return o, json.Unmarshal(b, &o)
}

package testbed

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
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

// spawn starts path as argv[0] name, with the arguments that args makes of its directory.
func spawn(path, name string, args func(dir string) []string) (c *child, err error) {
	dir, err := MkdirTemp(name)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, os.RemoveAll(dir))
		}
	}()
	log, err := os.Create(filepath.Join(dir, logFile))
	if err != nil {
		return nil, fmt.Errorf("testbed: %w", err)
	}
	defer func() { _ = log.Close() }() // the child has its own descriptor

	cmd := exec.Command(path) //nolint:noctx // it outlives the context of its start; stop ends it
	cmd.Args = append([]string{name}, args(dir)...)
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

// stop kills the child, waits until it is gone and removes its directory. It may be called again.
// A server that holds nothing worth keeping needs no goodbye.
func (c *child) stop() error {
	if err := c.Kill(); err != nil {
		return fmt.Errorf("testbed: %w", err)
	}
	if err := os.RemoveAll(c.dir); err != nil {
		return fmt.Errorf("testbed: %w", err)
	}
	return nil
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

// freePort returns a TCP port of the loopback interface that was free a moment ago.
func freePort() (int, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0") //nolint:noctx // binding a loopback port doesn't block
	if err != nil {
		return 0, fmt.Errorf("testbed: %w", err)
	}
	port := l.Addr().(*net.TCPAddr).Port
	if err := l.Close(); err != nil {
		return 0, fmt.Errorf("testbed: %w", err)
	}
	return port, nil
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

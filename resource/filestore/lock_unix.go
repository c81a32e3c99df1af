//go:build darwin || dragonfly || freebsd || linux || netbsd || openbsd

package filestore

import (
	"errors"
	"fmt"
	"os"
	"syscall"
)

// lock locks dir itself: a lock file could be deleted, and a second one locked.
func lock(dir *os.File) error {
	err := syscall.Flock(int(dir.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
	if errors.Is(err, syscall.EWOULDBLOCK) {
		return fmt.Errorf("another gatekeeper owns the directory; if it is frozen, kill it and open again: %w", err)
	}
	return err
}

//go:build darwin || dragonfly || freebsd || linux || netbsd || openbsd

package boltstore

import (
	"os"
	"syscall"
)

// unlockFile releases flock(2): closing f doesn't while the file is mapped.
func unlockFile(f *os.File) { _ = syscall.Flock(int(f.Fd()), syscall.LOCK_UN) }

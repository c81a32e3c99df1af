package boltstore

import (
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// isAt reports whether file is at path. It requests the inode alone: once a process has read a file's times, Linux 6.13 and later
// give the next write an exact time, and its sync takes longer.
func isAt(file os.FileInfo, path string) (bool, error) {
	var now unix.Statx_t
	was, ok := file.Sys().(*syscall.Stat_t)
	if !ok || unix.Statx(unix.AT_FDCWD, path, 0, unix.STATX_INO, &now) != nil { // a container may forbid statx
		return isAtByStat(file, path)
	}
	return was.Ino == now.Ino && uint64(was.Dev) == unix.Mkdev(now.Dev_major, now.Dev_minor), nil //nolint:unconvert // 32 bits on MIPS
}

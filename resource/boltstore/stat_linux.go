package boltstore

import (
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// isAt reports whether file is at path. It asks for the inode alone: once a process has asked for its times, Linux 6.13 and later note
// the exact time of the next write, and the sync of that takes longer, by a fifth where it takes 0.1 ms.
func isAt(file os.FileInfo, path string) (bool, error) {
	var now unix.Statx_t
	was, ok := file.Sys().(*syscall.Stat_t)
	if !ok || unix.Statx(unix.AT_FDCWD, path, 0, unix.STATX_INO, &now) != nil { // which a container may forbid
		return isAtByStat(file, path)
	}
	return was.Ino == now.Ino && uint64(was.Dev) == unix.Mkdev(now.Dev_major, now.Dev_minor), nil //nolint:unconvert // 32 bits on MIPS
}

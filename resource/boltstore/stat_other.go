//go:build !linux

package boltstore

import "os"

func isAt(file os.FileInfo, path string) (bool, error) { return isAtByStat(file, path) }

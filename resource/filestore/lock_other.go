//go:build !(darwin || dragonfly || freebsd || linux || netbsd || openbsd)

package filestore

import (
	"errors"
	"fmt"
	"os"
)

func lock(*os.File) error {
	return fmt.Errorf("one gatekeeper can't be had without flock(2); use package boltstore: %w", errors.ErrUnsupported)
}

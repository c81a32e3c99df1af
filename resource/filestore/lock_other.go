//go:build !(darwin || dragonfly || freebsd || linux || netbsd || openbsd)

package filestore

import (
	"errors"
	"fmt"
	"os"
)

func lock(*os.File) error {
	return fmt.Errorf("a single gatekeeper needs flock(2), which this system lacks; use package boltstore: %w", errors.ErrUnsupported)
}

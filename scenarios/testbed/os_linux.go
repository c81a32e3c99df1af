package testbed

import (
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"strconv"

	"github.com/fencelab/fencelab/internal/proc"
)

func children() (map[int][]int, error) {
	files, err := filepath.Glob("/proc/[0-9]*/stat")
	if err != nil {
		return nil, err
	}
	found := make(map[int][]int)
	for _, file := range files {
		stat, err := proc.Stat(file)
		if errors.Is(err, fs.ErrNotExist) {
			continue // it has ended
		}
		if err != nil {
			return nil, err
		}
		pid, pidErr := strconv.Atoi(filepath.Base(filepath.Dir(file)))
		parent, err := strconv.Atoi(stat[proc.Parent])
		if err := errors.Join(pidErr, err); err != nil {
			return nil, fmt.Errorf("%s: %w", file, err)
		}
		found[parent] = append(found[parent], pid)
	}
	return found, nil
}

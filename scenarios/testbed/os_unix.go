//go:build unix && !linux

package testbed

import (
	"fmt"
	"os/exec"
	"strings"
)

func children() (map[int][]int, error) {
	out, err := exec.Command("ps", "-A", "-o", "ppid=,pid=").Output() //nolint:noctx // ps ends by itself
	if err != nil {
		return nil, fmt.Errorf("ps: %w", err)
	}
	found := make(map[int][]int)
	for line := range strings.Lines(string(out)) {
		var parent, pid int
		if _, err := fmt.Sscan(line, &parent, &pid); err != nil {
			return nil, fmt.Errorf("ps: %q: %w", line, err)
		}
		found[parent] = append(found[parent], pid)
	}
	return found, nil
}

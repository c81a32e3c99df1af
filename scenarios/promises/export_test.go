package promises

import (
	"sync"
	"time"

	"github.com/fencelab/fencelab/faults"
	"github.com/fencelab/fencelab/scenarios"
)

// Hashes are CRC-32, FNV-1a, Postgres's hashtext, FNV-1, CRC-32C and the beginning of MD5.
var Hashes = hashes32

// Collisions returns two endings for each of Hashes.
func Collisions(base string) []string { return collisions(base) }

// Names are the promises' names.
func Names() (all []string) {
	for _, p := range promises {
		all = append(all, p.name)
	}
	return all
}

// Over replaces [scenarios.Node.Link].
func Over(k Kit, link func(scenarios.Node) (*faults.Link, string, error)) Kit {
	k.link = link
	return k
}

// Stalling makes k see a stalled machine at each check.
func Stalling(k Kit) Kit {
	now := time.Now()
	var mu sync.Mutex
	k.now = func() time.Time {
		mu.Lock()
		defer mu.Unlock()
		now = now.Add(k.TTL)
		return now
	}
	return k
}

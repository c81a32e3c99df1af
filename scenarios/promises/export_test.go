package promises

import (
	"sync"
	"time"

	"github.com/fencelab/fencelab/faults"
	"github.com/fencelab/fencelab/scenarios"
)

// Hashes are CRC-32, FNV-1a, Postgres's hashtext, FNV-1, CRC-32C and the beginning of MD5.
var Hashes = hashes32

// Collisions has two endings for each of them.
func Collisions(base string) []string { return collisions(base) }

// Names are the promises'.
func Names() (all []string) {
	for _, p := range promises {
		all = append(all, p.name)
	}
	return all
}

// Over has k use other links than [scenarios.Node.Link].
func Over(k Kit, link func(scenarios.Node) (*faults.Link, string, error)) Kit {
	k.link = link
	return k
}

// Stalling has k see a machine that has stalled whenever it looks.
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

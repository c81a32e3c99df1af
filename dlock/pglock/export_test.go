package pglock

import "time"

// Patience says how long a waiter of b's first waits for an answer.
func (b *Backend) Patience(d time.Duration) { b.patience = d }

// Recheck says how long a waiter of b's relies on a lease.
func (b *Backend) Recheck(d time.Duration) { b.recheck = d }

// Waiting is the number of keys for which calls wait.
func (b *Backend) Waiting() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return len(b.waiting)
}

// Passes reports whether a waiter retries after err.
var Passes = passes

package pglock

import "time"

// Patience sets how long a waiter of b first waits for a reply.
func (b *Backend) Patience(d time.Duration) { b.patience = d }

// Recheck sets how long a waiter of b relies on a lease.
func (b *Backend) Recheck(d time.Duration) { b.recheck = d }

// Waiting returns the number of keys with waiters.
func (b *Backend) Waiting() int { return b.waiting.Len() }

// Passes reports whether a waiter retries after err.
var Passes = passes

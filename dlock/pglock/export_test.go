package pglock

import "time"

// Patience says how long a waiter of b's first waits for an answer.
func (b *Backend) Patience(d time.Duration) { b.patience = d }

package zklock

import "time"

// Age is for tests.
var Age = age

// WatchAfter says how old a node gets before b watches it.
func (b *Backend) WatchAfter(age time.Duration) { b.unwatched = age }

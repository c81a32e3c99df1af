package consullock

import "github.com/fencelab/fencelab/dlock"

// Fire does what the timer of g's lease does.
func (b *Backend) Fire(g dlock.Grant) { b.expire(g.State.(*lease)) }

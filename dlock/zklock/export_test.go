package zklock

import (
	"context"
	"time"

	"github.com/fencelab/fencelab/dlock"
)

// WatchAfter sets the age at which b watches its nodes.
func (b *Backend) WatchAfter(age time.Duration) { b.unwatched = age }

// Place creates a node for key. token reads the queue and returns the token.
func (b *Backend) Place(key, owner string) (token func() (uint64, error), err error) {
	p := b.place(key, owner)
	made, _, err := b.create(context.Background(), p, time.Hour)
	if err != nil {
		return nil, err
	}
	return func() (uint64, error) {
		l := b.own(node{parent: p.parent, name: made[len(p.parent)+1:]})
		q, changed, err := b.queue(context.Background(), p.parent)
		if err != nil {
			return 0, err
		}
		err = b.number(context.Background(), l, q, changed)
		return uint64(l.token), err
	}, nil
}

// Watches returns the number of shared watches.
func (b *Backend) Watches() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return len(b.watches)
}

// Expire is what g's timer calls.
func Expire(g dlock.Grant) { g.State.(*lease).expire() }

// Stall stops g's timer, like a machine that stalls.
func Stall(g dlock.Grant) { g.State.(*lease).timer.Stop() }

// Ended reports whether g's watch says that its node is gone, and nothing else does yet.
func Ended(g dlock.Grant) bool {
	l := g.State.(*lease)
	l.mu.Lock()
	defer l.mu.Unlock()
	return !(&lease{fired: l.fired}).begin(time.Time{})
}

// Broken reports whether a request is repeated after err.
var Broken = broken

// CutShort is the error of a request whose context has ended with err.
func CutShort(err error) error { return &cutShortError{error: err} }

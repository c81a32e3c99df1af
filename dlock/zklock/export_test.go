package zklock

import (
	"context"
	"time"
)

// Age is for tests.
var Age = age

// WatchAfter says how old a node gets before b watches it.
func (b *Backend) WatchAfter(age time.Duration) { b.unwatched = age }

// Place makes a node of owner's for key. What it returns looks at the queue and tells the token that the node has then.
func (b *Backend) Place(key, owner string) (token func() (uint64, error), err error) {
	p := b.place(key, owner)
	made, _, err := b.create(context.Background(), p, time.Hour)
	if err != nil {
		return nil, err
	}
	return func() (uint64, error) {
		l := b.own(p, made, b.c.SessionID())
		q, changed, err := b.queue(context.Background(), p.parent)
		if err != nil {
			return 0, err
		}
		err = b.number(context.Background(), l, q, changed)
		return uint64(l.token), err
	}, nil
}

// Watches says how many watches are shared.
func (b *Backend) Watches() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return len(b.watches)
}

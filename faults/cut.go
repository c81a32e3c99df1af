package faults

import "context"

// Cut is a network partition: [Link.LoseRequests] and [Link.LoseReplies] at once.
func (l *Link) Cut(ctx context.Context) (Heal, error) {
	return inject(ctx, "cut", l.both(drop, 0)...)
}

package faults

import (
	"context"
	"fmt"
	"time"
)

// DelayRequests delays the clients' bytes and the end of their streams by at least d, without loss or reordering. In force means
// that no byte leaves the link for the server less than d after the link read it. If the server's socket accepts nothing for 10 s,
// DelayRequests fails. The heal forwards delayed bytes at once, in order, and returns when they are written to the server's socket.
func (l *Link) DelayRequests(ctx context.Context, d time.Duration) (Heal, error) {
	return late(ctx, "delay requests", d, effect{l.requests, delay, d})
}

// DelayReplies delays the server's bytes as [Link.DelayRequests] delays those of clients.
func (l *Link) DelayReplies(ctx context.Context, d time.Duration) (Heal, error) {
	return late(ctx, "delay replies", d, effect{l.replies, delay, d})
}

// Delay is [Link.DelayRequests] and [Link.DelayReplies] at once, by d each. Connecting takes no longer.
func (l *Link) Delay(ctx context.Context, d time.Duration) (Heal, error) {
	return late(ctx, "delay", d, l.both(delay, d)...)
}

func late(ctx context.Context, name string, d time.Duration, effects ...effect) (Heal, error) {
	if d <= 0 {
		return nil, fmt.Errorf("faults: %s by %v: it must be more than 0", name, d)
	}
	return inject(ctx, name, effects...)
}

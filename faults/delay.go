package faults

import (
	"context"
	"fmt"
	"time"
)

// DelayRequests delays every byte that a client sends by at least d, and the end of its stream too; nothing is lost, and
// nothing overtakes. In force means that no byte leaves the link for the server earlier than d after the link read it, those
// included that it had read before and not handed on. If the server's socket takes nothing for 10 s, DelayRequests fails.
//
// The heal hands what is under way to the server at once, in order, and returns when that is written to the server's socket.
func (l *Link) DelayRequests(ctx context.Context, d time.Duration) (Heal, error) {
	return late(ctx, "delay requests", d, effect{l.requests, delay, d})
}

// DelayReplies delays what the server sends, as [Link.DelayRequests] does what clients send.
func (l *Link) DelayReplies(ctx context.Context, d time.Duration) (Heal, error) {
	return late(ctx, "delay replies", d, effect{l.replies, delay, d})
}

// Delay is [Link.DelayRequests] and [Link.DelayReplies] at once, by d each. Connecting takes no longer, for the link itself
// accepts.
func (l *Link) Delay(ctx context.Context, d time.Duration) (Heal, error) {
	return late(ctx, "delay", d, l.both(delay, d)...)
}

func late(ctx context.Context, name string, d time.Duration, effects ...effect) (Heal, error) {
	if d <= 0 {
		return nil, fmt.Errorf("faults: %s by %v: it must be more than 0", name, d)
	}
	return inject(ctx, name, effects...)
}

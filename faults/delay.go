package faults

import (
	"context"
	"fmt"
	"time"
)

// DelayRequests slows the way to the server down: every byte that a client sends arrives later by d, and so does the end
// of what it sends; nothing is lost, and nothing overtakes. In force means that no byte leaves the link for the server
// earlier than d after the link read it, those included that it had read before and not handed on; what it had handed on
// has been written to the server's socket. There is no promise how much later. Of a server's socket that takes nothing for
// 10 s, DelayRequests returns an error.
//
// The heal hands what is under way to the server at once, in order, and returns when that is written to the server's
// socket. As with [Link.HoldRequests], a server that takes nothing makes it wait until its ctx ends.
func (l *Link) DelayRequests(ctx context.Context, d time.Duration) (Heal, error) {
	return late(ctx, "delay requests", d, strike{l, l.requests, delay, d})
}

// DelayReplies slows the way back down, as [Link.DelayRequests] does the way there.
func (l *Link) DelayReplies(ctx context.Context, d time.Duration) (Heal, error) {
	return late(ctx, "delay replies", d, strike{l, l.replies, delay, d})
}

// Delay is a slow link: [Link.DelayRequests] and [Link.DelayReplies] at once, by d each, so that an answer takes 2 d
// longer. Connecting takes no longer, for the link itself accepts.
func (l *Link) Delay(ctx context.Context, d time.Duration) (Heal, error) {
	return late(ctx, "delay", d, strike{l, l.requests, delay, d}, strike{l, l.replies, delay, d})
}

func late(ctx context.Context, name string, d time.Duration, strikes ...strike) (Heal, error) {
	if d <= 0 {
		return nil, fmt.Errorf("faults: %s by %v: it must be more than 0", name, d)
	}
	return inject(ctx, name, strikes...)
}

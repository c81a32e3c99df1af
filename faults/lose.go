package faults

import (
	"context"
	"fmt"
)

// LoseReplies discards the server's bytes: requests are applied, and no client learns of it. In force means that no byte leaves the
// link for a client. If a client's socket accepts nothing for 10 s, LoseReplies fails. The heal closes every connection accepted
// before, because its stream may have a hole; it returns when those pass nothing and new ones work.
func (l *Link) LoseReplies(ctx context.Context) (Heal, error) {
	return inject(ctx, "lose replies", effect{l.replies, drop, 0})
}

// LoseRequests discards the clients' bytes: nothing is applied. The heal is that of [Link.LoseReplies].
func (l *Link) LoseRequests(ctx context.Context) (Heal, error) {
	return inject(ctx, "lose requests", effect{l.requests, drop, 0})
}

// LoseRequestsFrom is [Link.LoseRequests] from the nth message of the clients on, counted from 1 over all connections. A message is
// what the link reads at once, including a client's keep-alives.
func (l *Link) LoseRequestsFrom(ctx context.Context, n int) (Heal, error) {
	return l.loseFrom(ctx, "lose requests", l.requests, n)
}

// LoseRepliesFrom is [Link.LoseReplies] from the reply to the nth message on; that message is applied.
func (l *Link) LoseRepliesFrom(ctx context.Context, n int) (Heal, error) {
	return l.loseFrom(ctx, "lose replies", l.replies, n)
}

// Loses reports whether the link is losing anything now.
func (l *Link) Loses() bool { return l.requests.drops() || l.replies.drops() }

func (l *Link) loseFrom(ctx context.Context, name string, d *direction, n int) (Heal, error) {
	if n < 1 {
		return nil, fmt.Errorf("faults: %s from message %d: they are counted from 1", name, n)
	}
	heal, err := inject(ctx, name, effect{d, pass, 0})
	if err != nil {
		return nil, err
	}
	l.requests.loseFrom(n, d)
	return Once(func(ctx context.Context) error {
		l.requests.loseFrom(0, nil)
		return heal(ctx)
	}), nil
}

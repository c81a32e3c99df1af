package faults

import (
	"context"
	"fmt"
)

// LoseReplies loses what the server sends: requests are applied, and no client learns of it. In force means that no byte leaves
// the link for a client. If a client's socket takes nothing for 10 s, LoseReplies fails.
//
// The heal closes every connection that the link had accepted before, for its stream may have a hole. It returns when no such
// connection passes anything and new ones work.
func (l *Link) LoseReplies(ctx context.Context) (Heal, error) {
	return inject(ctx, "lose replies", effect{l.replies, drop, 0})
}

// LoseRequests loses what the clients send. To them it looks like [Link.LoseReplies], but nothing is applied. The heal is that
// of LoseReplies.
func (l *Link) LoseRequests(ctx context.Context) (Heal, error) {
	return inject(ctx, "lose requests", effect{l.requests, drop, 0})
}

// LoseRequestsFrom is [Link.LoseRequests] from the nth message on that clients send, counted from 1 and over all connections. A
// message is what the link reads at once, also one that the client sends by itself, to keep the connection alive. With one n after
// the other, each message of a call is the first that is lost.
func (l *Link) LoseRequestsFrom(ctx context.Context, n int) (Heal, error) {
	return l.loseFrom(ctx, "lose requests", l.requests, n)
}

// LoseRepliesFrom is [Link.LoseReplies] from the reply to the nth message on, which is applied.
func (l *Link) LoseRepliesFrom(ctx context.Context, n int) (Heal, error) {
	return l.loseFrom(ctx, "lose replies", l.replies, n)
}

// Loses reports whether the link loses anything now: whether there has been an nth message, say.
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
	return func(ctx context.Context) error {
		l.requests.loseFrom(0, nil)
		return heal(ctx)
	}, nil
}

package faults

import (
	"context"
	"errors"
	"fmt"
	"time"
)

type effect struct {
	dir   *direction
	flow  flow
	delay time.Duration
}

// inject puts all effects in force as one fault, or none: if a direction is taken or closed, no connection is affected. The heal
// tries to end all of them.
func inject(ctx context.Context, name string, effects ...effect) (Heal, error) {
	if ctx.Err() != nil {
		return nil, fmt.Errorf("faults: %s: %w", name, context.Cause(ctx))
	}
	claimed := 0
	undo := func(addr string, err error) (Heal, error) {
		for _, e := range effects[:claimed] {
			e.dir.release()
		}
		return nil, fmt.Errorf("faults: %s on link %s: %w", name, addr, err)
	}
	var heals []Heal
	for _, e := range effects {
		if err := e.dir.claim(); err != nil {
			return undo(e.dir.addr, err)
		}
		claimed++
		heals = append(heals, Once(e.dir.heal))
	}
	for _, e := range effects {
		if err := e.dir.enforce(ctx, e.flow, e.delay); err != nil {
			return undo(e.dir.addr, err)
		}
	}
	return func(ctx context.Context) error {
		var errs []error
		for i, e := range effects {
			if err := heals[i](ctx); err != nil {
				errs = append(errs, fmt.Errorf("faults: heal %s on link %s: %w", name, e.dir.addr, err))
			}
		}
		return errors.Join(errs...)
	}, nil
}

// Cut is a network partition: [Link.LoseRequests] and [Link.LoseReplies] at once.
func (l *Link) Cut(ctx context.Context) (Heal, error) {
	return inject(ctx, "cut", l.both(drop, 0)...)
}

// LoseReplies discards the server's bytes: requests are applied, but no client learns of it. The heal closes every connection
// accepted before, because its stream may have a hole; it returns when those pass nothing and new ones work.
func (l *Link) LoseReplies(ctx context.Context) (Heal, error) {
	return inject(ctx, "lose replies", effect{l.replies, drop, 0})
}

// LoseRequests discards the clients' bytes: nothing is applied. The heal is that of [Link.LoseReplies].
func (l *Link) LoseRequests(ctx context.Context) (Heal, error) {
	return inject(ctx, "lose requests", effect{l.requests, drop, 0})
}

// LoseRequestsFrom is [Link.LoseRequests] from the nth message of the clients on, counted from 1 over all connections. A message
// is what the link reads at once, including keep-alives.
func (l *Link) LoseRequestsFrom(ctx context.Context, n int) (Heal, error) {
	return l.loseFrom(ctx, "lose requests", l.requests, n)
}

// LoseRepliesFrom is [Link.LoseReplies] from the reply to the nth message on; that message is applied.
func (l *Link) LoseRepliesFrom(ctx context.Context, n int) (Heal, error) {
	return l.loseFrom(ctx, "lose replies", l.replies, n)
}

// Loses reports whether the link discards bytes now.
func (l *Link) Loses() bool { return l.requests.drops(false) || l.replies.drops(false) }

// HasLost reports whether the loss in force has discarded anything. The server has got the request whose reply is lost.
func (l *Link) HasLost() bool { return l.requests.drops(true) || l.replies.drops(true) }

func (l *Link) loseFrom(ctx context.Context, name string, d *direction, n int) (Heal, error) {
	if n < 1 {
		return nil, fmt.Errorf("faults: %s from message %d: messages count from 1", name, n)
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

// HoldRequests holds the clients' bytes, like a network that delivers late. Clients notice nothing, and their bytes stay held
// even if they close the connection or die.
//
// The heal, deliver, forwards the held bytes, in order on each connection, and returns when they are written to the server's
// socket: the server may not have read them yet. If the server is paused or dead, deliver waits until its ctx ends.
func (l *Link) HoldRequests(ctx context.Context) (deliver Heal, err error) {
	return inject(ctx, "hold requests", effect{l.requests, hold, 0})
}

// AwaitHeld waits until the link holds a client's bytes. It fails if [Link.HoldRequests] isn't in force, or ends.
func (l *Link) AwaitHeld(ctx context.Context) error {
	if err := l.requests.held(ctx); err != nil {
		return fmt.Errorf("faults: await held requests on link %s: %w", l.Addr(), err)
	}
	return nil
}

// DelayRequests delays the clients' bytes and the end of their streams by at least d after the link read them, without loss or
// reordering. The heal forwards delayed bytes at once, in order, and returns when they are written to the server's socket.
func (l *Link) DelayRequests(ctx context.Context, d time.Duration) (Heal, error) {
	return injectDelay(ctx, "delay requests", d, effect{l.requests, delay, d})
}

// DelayReplies is [Link.DelayRequests] for the server's bytes.
func (l *Link) DelayReplies(ctx context.Context, d time.Duration) (Heal, error) {
	return injectDelay(ctx, "delay replies", d, effect{l.replies, delay, d})
}

// Delay is [Link.DelayRequests] and [Link.DelayReplies] at once. Connecting takes no longer.
func (l *Link) Delay(ctx context.Context, d time.Duration) (Heal, error) {
	return injectDelay(ctx, "delay", d, l.both(delay, d)...)
}

func injectDelay(ctx context.Context, name string, d time.Duration, effects ...effect) (Heal, error) {
	if d <= 0 {
		return nil, fmt.Errorf("faults: %s by %v: the delay must be positive", name, d)
	}
	return inject(ctx, name, effects...)
}

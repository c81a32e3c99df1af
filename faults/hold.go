package faults

import (
	"context"
	"fmt"
)

// HoldRequests holds what the clients send, like a network that delivers late. In force means that no byte leaves the link for
// the server: all that a client sends from now on is held, and so is what the link had not read yet. Replies pass, and clients
// can connect. They notice nothing, however much they send; what they sent is held even when they close the connection, or
// die. If the server's socket takes nothing for 10 s, HoldRequests fails.
//
// The heal, deliver, hands what is held to the server, in order on each connection, and returns when that is written to the
// server's socket: the server may not have read it yet. If the server takes nothing, being paused or gone, deliver waits until
// its ctx ends.
func (l *Link) HoldRequests(ctx context.Context) (deliver Heal, err error) {
	return inject(ctx, "hold requests", effect{l.requests, hold, 0})
}

// AwaitHeld waits until the link holds something that a client has sent. It returns an error if [Link.HoldRequests] isn't in
// force, or ends.
func (l *Link) AwaitHeld(ctx context.Context) error {
	if err := l.requests.held(ctx); err != nil {
		return fmt.Errorf("faults: await held requests on link %s: %w", l.Addr(), err)
	}
	return nil
}

package faults

import (
	"context"
	"fmt"
)

// HoldRequests keeps what the clients send, like a network that delivers late. In force means that no byte leaves the
// link for the server any more: all that a client sends from now on is held, and so is what it sent before and the
// link had not read yet; what the link had handed on before has been written to the server's socket. Replies pass, as
// does a client's connecting. The clients notice nothing, however much they send; they may close the connection, or die,
// and what they sent is still held. Of a server's socket that takes nothing for 10 s, HoldRequests returns an error.
//
// The heal, deliver, hands what is held to the server, in the order in which it was sent on each connection, after
// which connections go on as if nothing had been. It returns when all that the link held has been written to the
// server's socket: the server may not have read it yet. What a client sent a moment before deliver may still be on its
// way to the link, and follows by itself. A server that takes nothing, being paused or gone, makes deliver wait until
// its ctx ends.
func (l *Link) HoldRequests(ctx context.Context) (deliver Heal, err error) {
	return inject(ctx, "hold requests", strike{l, l.requests, hold, 0})
}

// AwaitHeld waits until the link holds something that a client has sent, and so until that is on its way and late. It
// returns an error if [Link.HoldRequests] isn't in force, or ends.
func (l *Link) AwaitHeld(ctx context.Context) error {
	if err := l.requests.held(ctx); err != nil {
		return fmt.Errorf("faults: await held requests on link %s: %w", l.Addr(), err)
	}
	return nil
}

package faults

import (
	"context"
	"fmt"
)

// HoldRequests holds the clients' bytes, like a network that delivers late. In force means that no byte leaves the link for the
// server. Clients notice nothing, and their bytes stay held even if they close the connection or die. If the server's socket
// accepts nothing for 10 s, HoldRequests fails.
//
// The heal, deliver, forwards the held bytes, in order on each connection, and returns when they are written to the server's
// socket: the server may not have read them yet. If the server is paused or gone, deliver waits until its ctx ends.
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

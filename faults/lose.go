package faults

import "context"

// LoseReplies loses what the server sends: requests arrive and are applied, and no client hears of it. In force means
// that no byte leaves the link for a client any more; what it had handed on before has been written to the client's
// socket. Of a socket that takes nothing for 10 s, LoseReplies returns an error.
//
// The heal closes every connection that the link had accepted before, for its stream may have a hole; a client sees
// that as the end of the stream or a reset. It returns when no such connection passes anything any more and new ones
// work.
func (l *Link) LoseReplies(ctx context.Context) (Heal, error) {
	return inject(ctx, "lose replies", strike{l, l.replies, drop, 0})
}

// LoseRequests loses what the clients send: to them it looks like [Link.LoseReplies], but nothing is applied. In force
// means that no byte leaves the link for the server any more, as with LoseReplies for a client. The heal is that of
// LoseReplies.
func (l *Link) LoseRequests(ctx context.Context) (Heal, error) {
	return inject(ctx, "lose requests", strike{l, l.requests, drop, 0})
}

package faults

import (
	"context"
	"errors"
	"fmt"
	"net"
	"time"
)

// undoTimeout bounds how long a refuse that failed waits for the proxy to stop, so as to listen again.
const undoTimeout = 10 * time.Second

// Refuse is a partition that says so, like a host whose server has died, or a firewall that rejects: clients learn of it at
// once, where [Link.Cut] lets them wait. In force means that every connection of the link is closed, to clients and to the
// server, what was under way on them is lost, and whoever connects is refused (ECONNREFUSED). No other fault of the link can be
// in force.
//
// The heal returns when clients can connect again, at the same address.
func (l *Link) Refuse(ctx context.Context) (Heal, error) {
	open, err := inject(ctx, "refuse", l.both(shut, 0)...)
	if err != nil {
		return nil, err
	}
	stopped := make(chan struct{})
	go func() {
		defer close(stopped)
		l.proxy.Stop() // once it has connected to the server for the last client, or failed to
	}()
	listen := Once(func(ctx context.Context) error {
		select {
		case <-stopped:
			return l.listen()
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	})
	heal := func(ctx context.Context) error {
		if err := listen(ctx); err != nil {
			return fmt.Errorf("faults: heal refuse on link %s: %w", l.Addr(), err)
		}
		return open(ctx)
	}
	select {
	case <-stopped:
		err = errors.Join(l.requests.drained(ctx), l.replies.drained(ctx))
	case <-ctx.Done():
		err = context.Cause(ctx)
	}
	if err != nil {
		undoCtx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTimeout)
		defer cancel()
		return nil, errors.Join(fmt.Errorf("faults: refuse on link %s: %w", l.Addr(), err), heal(undoCtx))
	}
	return heal, nil
}

// listen lets clients connect again, unless the link is closed.
func (l *Link) listen() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return net.ErrClosed
	}
	return l.proxy.Start()
}

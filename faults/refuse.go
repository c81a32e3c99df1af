package faults

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"
)

// undoTimeout bounds how long a refuse that failed waits for the proxy, so as to listen again.
const undoTimeout = 10 * time.Second

// Refuse is a partition that says so, like a host whose server has died, or a firewall that rejects: clients learn of it
// at once, where [Link.Cut] lets them wait. In force means that every connection of the link is closed, to clients and to
// the server, what was under way on them is lost, and whoever connects is refused (ECONNREFUSED). It can't be in force
// together with any other fault of the link.
//
// The heal returns when clients can connect again, at the same address.
func (l *Link) Refuse(ctx context.Context) (Heal, error) {
	heal, err := inject(ctx, "refuse", strike{l, l.requests, shut, 0}, strike{l, l.replies, shut, 0})
	if err != nil {
		return nil, err
	}
	listen, err := l.unlisten(ctx)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("faults: refuse on link %s: %w", l.Addr(), err), undo(ctx, heal))
	}
	return func(ctx context.Context) error {
		if err := listen(ctx); err != nil {
			return fmt.Errorf("faults: heal refuse on link %s: %w", l.Addr(), err)
		}
		return heal(ctx)
	}, nil
}

// unlisten stops listening, and returns when no connection is left. Its caller has shut the valves, and keeps other
// faults out.
func (l *Link) unlisten(ctx context.Context) (listen Heal, err error) {
	stopped := make(chan struct{})
	go func() {
		defer close(stopped)
		l.proxy.Stop() // once it has connected to the server for the last client, or failed to
	}()
	var mu sync.Mutex
	listens := false
	listen = func(ctx context.Context) error {
		mu.Lock()
		defer mu.Unlock()
		if listens {
			return nil
		}
		select {
		case <-stopped:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
		if err := l.listen(); err != nil {
			return err
		}
		listens = true
		return nil
	}
	select {
	case <-stopped:
		err = errors.Join(l.requests.drained(ctx), l.replies.drained(ctx))
	case <-ctx.Done():
		err = context.Cause(ctx)
	}
	if err != nil {
		return nil, errors.Join(err, undo(ctx, listen))
	}
	return listen, nil
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

// undo heals what is not to stay, though ctx may have ended.
func undo(ctx context.Context, heal Heal) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTimeout)
	defer cancel()
	return heal(ctx)
}

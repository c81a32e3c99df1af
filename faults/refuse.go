package faults

import (
	"context"
	"errors"
	"fmt"
	"net"
	"time"
)

// undoTimeout bounds the wait for a failed Refuse's undo, which then continues in the background.
const undoTimeout = time.Second

// Refuse is a partition that clients detect at once. In force means that every connection is closed on both sides, bytes on their
// way are lost, and new connections are refused (ECONNREFUSED). No other fault of the link can be in force. The heal returns when
// clients can connect again, at the same address.
func (l *Link) Refuse(ctx context.Context) (Heal, error) {
	open, err := inject(ctx, "refuse", l.both(shut, 0)...)
	if err != nil {
		return nil, err
	}
	stopped := make(chan struct{})
	go func() {
		defer close(stopped)
		l.stop() // returns when the last dial of the server has succeeded or failed
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
		err = fmt.Errorf("faults: refuse on link %s: %w", l.Addr(), err)
		undone := make(chan error, 1)
		go func() { undone <- heal(context.WithoutCancel(ctx)) }()
		select {
		case failed := <-undone:
			return nil, errors.Join(err, failed)
		case <-time.After(undoTimeout):
			return nil, fmt.Errorf("%w; clients are refused until the last connection attempt to the server has ended", err)
		}
	}
	return heal, nil
}

func (l *Link) listen() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return net.ErrClosed
	}
	return l.start()
}

package zklock

import (
	"context"
	"fmt"
	"time"

	"github.com/go-zookeeper/zk"
)

const (
	// maxInFlight limits the client's requests in flight. A frozen server holds each for minutes, and with it a goroutine,
	// although the call has returned.
	maxInFlight = 64
	maxWorkers  = 8
	// goodbye is how long a call waits, after its context's end, for its node to be deleted.
	goodbye = 250 * time.Millisecond
)

// cutShortError is the error of a request cut short by its context.
type cutShortError struct {
	error
	answered context.Context // if set, the request may still arrive; ends with the client's reply
}

func (c *cutShortError) Unwrap() error { return c.error }

type reply struct {
	ok    bool
	path  string
	names []string
	data  []byte
	stat  *zk.Stat
	fired <-chan zk.Event
}

// call returns f's reply. If ctx ends first, the error wraps ctx's Err but not its cause, which may be any error, even one of
// ZooKeeper's replies. [failed] adds the cause.
func (b *Backend) call(ctx context.Context, f func() (reply, error)) (reply, error) {
	if ctx.Done() == nil {
		return f()
	}
	notSent := func() (reply, error) {
		return reply{}, &cutShortError{error: fmt.Errorf("request not sent: %w", ctx.Err())}
	}
	if ctx.Err() != nil {
		return notSent()
	}
	select {
	case b.inFlight <- struct{}{}:
	case <-ctx.Done():
		return notSent()
	}
	var r reply
	var err error
	answered, done := context.WithCancel(b.always)
	go func() {
		defer done()
		r, err = f()
		<-b.inFlight
	}()
	select {
	case <-answered.Done():
		return r, err
	case <-ctx.Done():
		return reply{}, &cutShortError{fmt.Errorf("ZooKeeper doesn't answer: %w", ctx.Err()), answered}
	}
}

func (b *Backend) exists(ctx context.Context, path string) (reply, error) {
	return b.call(ctx, func() (r reply, err error) { r.ok, r.stat, err = b.c.Exists(path); return r, err })
}

func (b *Backend) children(ctx context.Context, path string) (reply, error) {
	return b.call(ctx, func() (r reply, err error) { r.names, r.stat, err = b.c.Children(path); return r, err })
}

func (b *Backend) childrenW(ctx context.Context, path string) (reply, error) {
	return b.call(ctx, func() (r reply, err error) { _, _, r.fired, err = b.c.ChildrenW(path); return r, err })
}

func (b *Backend) getW(ctx context.Context, path string) (reply, error) {
	return b.call(ctx, func() (r reply, err error) { r.data, r.stat, r.fired, err = b.c.GetW(path); return r, err })
}

func (b *Backend) setData(ctx context.Context, path string, data []byte, version int32) error {
	_, err := b.call(ctx, func() (r reply, err error) { _, err = b.c.Set(path, data, version); return r, err })
	return err
}

func (b *Backend) createAt(ctx context.Context, path string, data []byte, flags int32) (reply, error) {
	return b.call(ctx, func() (r reply, err error) {
		if flags == zk.FlagContainer {
			_, err = b.c.CreateContainer(path, nil, zk.FlagContainer, b.acl)
		} else {
			r.path, err = b.c.Create(path, data, flags, b.acl)
		}
		return r, err
	})
}

func (b *Backend) deleteAt(ctx context.Context, path string, version int32) error {
	_, err := b.call(ctx, func() (r reply, err error) { return r, b.c.Delete(path, version) })
	return err
}

func (b *Backend) chore(f func()) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.chores = append(b.chores, f)
	if b.workers < maxWorkers {
		b.workers++
		go b.work()
	}
}

func (b *Backend) work() {
	b.mu.Lock()
	defer b.mu.Unlock()
	for len(b.chores) > 0 {
		f := b.chores[0]
		b.chores = b.chores[1:]
		b.mu.Unlock()
		f()
		b.mu.Lock()
	}
	b.workers--
}

package zklock

import (
	"context"
	"time"

	"github.com/go-zookeeper/zk"
)

const (
	// mostAsked is how many calls' requests the client has at once. While the server is frozen, it keeps each for minutes,
	// and with it a goroutine, whatever has become of the call.
	mostAsked = 64
	// mostChores is how many goroutines clean up.
	mostChores = 8
	// goodbye is how long a call waits, after its context's end, for its node to be deleted; that goes on in the background.
	goodbye = 250 * time.Millisecond
)

// cutShortError is the error of a request that a context's end has cut short.
type cutShortError struct {
	sent  <-chan struct{} // not nil: it may arrive yet; closed when the client has its answer
	cause error
}

func (c *cutShortError) Unwrap() error { return c.cause }
func (c *cutShortError) Error() string {
	if c.sent == nil {
		return "request not sent: " + c.cause.Error()
	}
	return "ZooKeeper doesn't answer: " + c.cause.Error()
}

// reply is what there is of an answer.
type reply struct {
	ok    bool
	path  string
	names []string
	data  []byte
	stat  *zk.Stat
	fired <-chan zk.Event
}

// ask has f send a request, and returns with its answer or ctx's end.
func (b *Backend) ask(ctx context.Context, f func() (reply, error)) (reply, error) {
	if ctx.Done() == nil {
		return f()
	}
	if ctx.Err() != nil {
		return reply{}, &cutShortError{cause: context.Cause(ctx)}
	}
	select {
	case b.asked <- struct{}{}:
	case <-ctx.Done():
		return reply{}, &cutShortError{cause: context.Cause(ctx)}
	}
	type answer struct {
		reply
		err error
	}
	answered, over := make(chan answer, 1), make(chan struct{})
	go func() {
		r, err := f()
		<-b.asked
		answered <- answer{r, err}
		close(over)
	}()
	select {
	case a := <-answered:
		return a.reply, a.err
	case <-ctx.Done():
		return reply{}, &cutShortError{sent: over, cause: context.Cause(ctx)}
	}
}

func (b *Backend) exists(ctx context.Context, path string) (bool, *zk.Stat, error) {
	r, err := b.ask(ctx, func() (r reply, err error) { r.ok, r.stat, err = b.c.Exists(path); return r, err })
	return r.ok, r.stat, err
}

func (b *Backend) children(ctx context.Context, path string) ([]string, *zk.Stat, error) {
	r, err := b.ask(ctx, func() (r reply, err error) { r.names, r.stat, err = b.c.Children(path); return r, err })
	return r.names, r.stat, err
}

// childrenW watches for the end of an ephemeral node, which has no children.
func (b *Backend) childrenW(ctx context.Context, path string) (<-chan zk.Event, error) {
	r, err := b.ask(ctx, func() (r reply, err error) { _, _, r.fired, err = b.c.ChildrenW(path); return r, err })
	return r.fired, err
}

func (b *Backend) getW(ctx context.Context, path string) ([]byte, *zk.Stat, <-chan zk.Event, error) {
	r, err := b.ask(ctx, func() (r reply, err error) { r.data, r.stat, r.fired, err = b.c.GetW(path); return r, err })
	return r.data, r.stat, r.fired, err
}

func (b *Backend) setData(ctx context.Context, path string, data []byte, version int32) error {
	_, err := b.ask(ctx, func() (r reply, err error) { _, err = b.c.Set(path, data, version); return r, err })
	return err
}

func (b *Backend) createAt(ctx context.Context, path string, data []byte, flags int32) (string, error) {
	r, err := b.ask(ctx, func() (r reply, err error) { r.path, err = b.c.Create(path, data, flags, b.acl); return r, err })
	return r.path, err
}

func (b *Backend) createContainer(ctx context.Context, path string) error {
	_, err := b.ask(ctx, func() (r reply, err error) {
		_, err = b.c.CreateContainer(path, nil, zk.FlagContainer, b.acl)
		return r, err
	})
	return err
}

func (b *Backend) deleteAt(ctx context.Context, path string, version int32) error {
	_, err := b.ask(ctx, func() (r reply, err error) { return r, b.c.Delete(path, version) })
	return err
}

// chore has f run in the background, after others if there are many. finished is closed after it.
func (b *Backend) chore(f func()) (finished <-chan struct{}) {
	done := make(chan struct{})
	b.mu.Lock()
	defer b.mu.Unlock()
	b.chores = append(b.chores, func() {
		defer close(done)
		f()
	})
	if b.workers < mostChores {
		b.workers++
		go b.work()
	}
	return done
}

// work does chores until there are none.
func (b *Backend) work() {
	for {
		b.mu.Lock()
		if len(b.chores) == 0 {
			b.workers--
			b.mu.Unlock()
			return
		}
		f := b.chores[0]
		b.chores = b.chores[1:]
		b.mu.Unlock()
		f()
	}
}

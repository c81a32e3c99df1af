package redlock

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"
)

//go:embed acquire.lua
var acquireLua string

//go:embed unsafe.lua
var unsafeLua string

//go:embed mint.lua
var mintLua string

//go:embed renew.lua
var renewLua string

//go:embed release.lua
var releaseLua string

var (
	acquireScript = redis.NewScript(acquireLua)
	unsafeScript  = redis.NewScript(unsafeLua)
	mintScript    = redis.NewScript(mintLua)
	renewScript   = redis.NewScript(renewLua)
	releaseScript = redis.NewScript(releaseLua)
)

// vote is a node's answer to the request for its lock.
type vote struct {
	took  bool
	token uint64 // the node's counter
	own   bool   // this owner wrote it

	again bool // took: the lock already was this owner's

	holder string        // not took: who has it
	left   time.Duration // not took: until when; less than 0 if for ever
}

func acquireOn(ctx context.Context, c redis.UniversalClient, s *redis.Script, keys []string, owner string, attempt, ttl int64) (vote, error) {
	v, err := s.Run(ctx, c, keys, owner, attempt, ttl).Slice()
	if err != nil {
		return vote{}, err
	}
	n := func(i int) int64 {
		x, _ := v[i].(int64)
		return x
	}
	switch {
	case len(v) == 4 && n(0) == 1:
		return vote{took: true, token: uint64(n(1)), own: n(2) == 1, again: n(3) == 1}, nil
	case len(v) == 5 && n(0) == 0:
		holder, _ := v[4].(string)
		return vote{token: uint64(n(1)), own: n(2) == 1, left: time.Duration(n(3)) * time.Millisecond, holder: holder}, nil
	}
	return vote{}, fmt.Errorf("the acquire script returned %v", v)
}

// written is a node's answer to a token.
type written int

const (
	accepted written = iota
	outdone          // the node's counter is there or beyond
	gone             // the lock is not this attempt's
)

func mintOn(
	ctx context.Context, c redis.UniversalClient, keys []string, owner string, attempt int64, token uint64,
) (w written, counter uint64, err error) {
	v, err := mintScript.Run(ctx, c, keys, owner, attempt, token).Int64Slice()
	switch {
	case err != nil:
		return gone, 0, err
	case len(v) != 2 || v[0] < -1 || v[0] > 1:
		return gone, 0, fmt.Errorf("the mint script returned %v", v)
	case v[0] < 0:
		return gone, 0, nil
	case v[0] == 0:
		return outdone, uint64(v[1]), nil
	}
	return accepted, token, nil
}

// releases is how often a release is sent to a node whose connections break.
const releases = 3

// releaseOn reports whether the lock was the owner's. It repeats the script itself instead of having go-redis do so behind
// its back: after a lost reply, a script that finds nothing says nothing about whose the lock was.
func releaseOn(ctx context.Context, c redis.UniversalClient, lock, owner string, attempt int64) (owned bool, err error) {
	run := func(how, what string) *redis.Cmd {
		cmd := redis.NewCmd(ctx, how, what, 1, lock, owner, attempt)
		cmd.SetFirstKeyPos(3) // where a Cluster client looks for the slot
		_ = c.Process(ctx, once{cmd})
		return cmd
	}
	for range releases {
		cmd := run("evalsha", releaseScript.Hash())
		if redis.HasErrorPrefix(cmd.Err(), "NOSCRIPT") {
			cmd = run("eval", releaseLua)
		}
		n, failure := cmd.Int64()
		switch {
		case failure == nil && n == 1:
			return true, nil
		case failure == nil:
			return false, err // of an earlier try, which may have freed it
		case ctx.Err() != nil:
			return false, failure
		}
		err = failure
	}
	return false, err
}

type once struct{ *redis.Cmd }

func (once) NoRetry() bool { return true }

// answer is what came of asking a node.
type answer[T any] struct {
	node int
	val  T
	err  error
}

// poll is a question that has been put to all nodes.
type poll[T any] struct {
	b       *Backend
	answers chan answer[T]  // has room for all
	end     <-chan struct{} // when an answer comes too late
	cancel  context.CancelFunc
	left    int // nodes whose answer next has not returned
}

var errNoAnswer = errors.New("no answer in time")

// ask puts a question to all nodes at once. The requests don't end with ctx: those that nobody waits for any more still
// have to come to an end that is known, and the Backend's Close waits for it.
func ask[T any](ctx context.Context, b *Backend, timeout time.Duration, f func(ctx context.Context, node int) (T, error)) *poll[T] {
	p := &poll[T]{b: b, answers: make(chan answer[T], len(b.nodes)), left: len(b.nodes)}
	ctx, p.cancel = context.WithTimeout(context.WithoutCancel(ctx), timeout)
	p.end = ctx.Done()
	under := new(atomic.Int32)
	under.Store(int32(len(b.nodes)))
	for i := range b.nodes {
		b.busy.Go(func() {
			v, err := f(ctx, i)
			p.answers <- answer[T]{i, v, err}
			if under.Add(-1) == 0 {
				p.cancel()
			}
		})
	}
	return p
}

// next returns one more answer, in the order in which they come. A node that takes too long answers with an error.
// next fails when ctx ends or the Backend is closed.
func (p *poll[T]) next(ctx context.Context) (answer[T], error) {
	p.left--
	select {
	case a := <-p.answers:
		return a, nil
	default:
	}
	select {
	case a := <-p.answers:
		return a, nil
	case <-p.end:
		select {
		case a := <-p.answers: // all have come
			return a, nil
		default:
			return answer[T]{node: -1, err: errNoAnswer}, nil
		}
	case <-ctx.Done():
		return answer[T]{}, ended(ctx)
	case <-p.b.closed:
		return answer[T]{}, errClosed
	}
}

package redlock

import (
	"cmp"
	"context"
	"embed"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/fencelab/fencelab/internal/redisscript"
)

//go:embed *.lua
var lua embed.FS

var (
	acquireScript = redisscript.Load(lua, "acquire.lua")
	unsafeScript  = redisscript.Load(lua, "unsafe.lua")
	mintScript    = redisscript.Load(lua, "mint.lua")
	renewScript   = redisscript.Load(lua, "renew.lua")
	releaseScript = redisscript.Load(lua, "release.lua")
)

type vote struct {
	took   bool
	token  uint64        // the node's counter
	own    bool          // this owner wrote it
	again  bool          // took: this owner already had the lock
	left   time.Duration // not took: the rest of the other's lease; negative if it has no end
	holder string        // not took: the other owner
}

func acquireOn(ctx context.Context, c redis.UniversalClient, s *redis.Script, keys []string, owner string, attempt, ttl int64) (vote, error) {
	v, err := s.Run(ctx, c, keys, owner, attempt, ttl).Slice()
	if err != nil {
		return vote{}, err
	}
	if len(v) != 5 {
		return vote{}, fmt.Errorf("the acquire script returned %v", v)
	}
	took, token, own, n := v[0] == int64(1), toInt(v[1]), v[2] == int64(1), toInt(v[3])
	holder, _ := v[4].(string)
	return vote{took, uint64(token), own, n == 1, time.Duration(n) * time.Millisecond, holder}, nil
}

func toInt(v any) int64 {
	n, _ := v.(int64)
	return n
}

type written int // a node's reply to a token

const (
	gone    written = iota - 1 // this attempt no longer has the lock
	outdone                    // the node's counter is not smaller
	accepted
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
	}
	return written(v[0]), uint64(v[1]), nil
}

const maxReleases = 3 // to a node whose connections break

// releaseOn reports whether the owner had the lock. It retries itself, not through go-redis: a retry that finds nothing after a
// lost reply leaves that unknown.
func releaseOn(ctx context.Context, c redis.UniversalClient, lock, owner string, attempt int64) (owned bool, err error) {
	for range maxReleases {
		n, failure := releaseScript.Run(ctx, redisscript.Once{UniversalClient: c}, []string{lock}, owner, attempt).Int64()
		if failure == nil && n == 1 {
			return true, nil
		}
		err = cmp.Or(failure, err) // an earlier try may have freed it
		if failure == nil || ctx.Err() != nil {
			break
		}
	}
	return false, err
}

// poll is a request to all nodes.
type poll[T any] struct {
	b       *Backend
	answers chan answer[T]
	end     <-chan struct{} // the timeout
	cancel  context.CancelFunc
	left    int // replies that next has not returned
	failed  int // nodes
	failure error
}

type answer[T any] struct {
	node int
	val  T
	err  error
}

var errNoAnswer = errors.New("no reply in time")

// broadcast calls f for all nodes. The calls don't end with ctx: their outcome must become known. Close waits for them.
func broadcast[T any](ctx context.Context, b *Backend, timeout time.Duration, f func(ctx context.Context, node int) (T, error)) *poll[T] {
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

// next returns the next reply until ctx ends; ok is false if it is an error, or missing after the timeout.
func (p *poll[T]) next(ctx context.Context) (val T, ok bool, err error) {
	p.left--
	var a answer[T]
	select {
	case a = <-p.answers:
	default:
		select {
		case a = <-p.answers:
		case <-p.end:
			select {
			case a = <-p.answers: // all have arrived
			default:
				p.failed++
				return val, false, nil
			}
		case <-ctx.Done():
			return val, false, ended(ctx)
		}
	}
	if a.err != nil {
		p.failed++
		if p.failure == nil {
			p.failure = fmt.Errorf("node %d: %w", a.node, a.err)
		}
	}
	return a.val, a.err == nil, nil
}

func (p *poll[T]) unavailable() error {
	return fmt.Errorf("redlock: no quorum of %d: %d of %d nodes failed, first %w",
		p.b.quorum, p.failed, len(p.b.nodes), cmp.Or(p.failure, errNoAnswer))
}

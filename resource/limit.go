package resource

import (
	"context"
	"errors"
	"fmt"
)

// ErrJump is wrapped by the error of a call that [LimitJumps] refuses. Nothing was changed.
var ErrJump = errors.New("resource: the fencing token is too far ahead")

// LimitJumps wraps s to refuse a token that exceeds the greatest one seen for the key by more than maxJump. A token of 2^64-1,
// sent by mistake, would otherwise lock the key for ever. Each call costs a read. Many small jumps still get through. maxJump
// must exceed the first token for a key; 1<<48 is enough for etcd, Consul and ZooKeeper, whose tokens count all changes of a
// cluster, and for a Redis whose counters are reaped.
func LimitJumps(s Store, maxJump uint64) Store { return &limited{s, maxJump} }

type limited struct {
	Store
	maxJump uint64
}

func (l *limited) check(ctx context.Context, key string, token uint64) error {
	rec, err := l.Read(ctx, key)
	if err != nil && !errors.Is(err, ErrNotFound) {
		return err
	}
	if seen := rec.MaxFence.Token; token-min(token, seen) > l.maxJump {
		return fmt.Errorf("%w: %d for %q, which has seen %d; the limit is %d more", ErrJump, token, key, seen, l.maxJump)
	}
	return nil
}

// Write is [Store.Write].
func (l *limited) Write(ctx context.Context, key string, f Fence, value []byte) error {
	if err := l.check(ctx, key, f.Token); err != nil {
		return err
	}
	return l.Store.Write(ctx, key, f, value)
}

// ReadFenced is [Store.ReadFenced].
func (l *limited) ReadFenced(ctx context.Context, key string, f Fence) (Record, error) {
	if err := l.check(ctx, key, f.Token); err != nil {
		return Record{}, err
	}
	return l.Store.ReadFenced(ctx, key, f)
}

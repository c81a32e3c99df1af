package resource

import (
	"context"
	"errors"
	"fmt"
)

// ErrJump is wrapped by the error of a call that [LimitJumps] refuses. Nothing was changed.
var ErrJump = errors.New("resource: the fencing token is too far ahead")

// LimitJumps wraps s to refuse a token that exceeds the greatest one seen for the key by more than most: a single token of
// 2^64-1, sent by mistake or malice, would lock the key for good. Each call costs a read. A caller that raises the token in
// many small steps still gets through.
//
// A new key has seen 0, so most must exceed a lock's first token. The tokens of etcd, Consul and ZooKeeper count all that
// their cluster does, and ZooKeeper's begin at 2^32; 1<<48 is enough for each.
func LimitJumps(s Store, most uint64) Store { return &limited{s, most} }

type limited struct {
	Store
	most uint64
}

func (l *limited) check(ctx context.Context, key string, token uint64) error {
	rec, err := l.Read(ctx, key)
	if err != nil && !errors.Is(err, ErrNotFound) {
		return err
	}
	if seen := rec.MaxFence.Token; token > seen && token-seen > l.most {
		return fmt.Errorf("%w: %d for %q, which has seen %d; the limit is %d more", ErrJump, token, key, seen, l.most)
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
func (l *limited) ReadFenced(ctx context.Context, key string, token uint64) (Record, error) {
	if err := l.check(ctx, key, token); err != nil {
		return Record{}, err
	}
	return l.Store.ReadFenced(ctx, key, token)
}

package resource

import (
	"context"
	"errors"
	"fmt"
)

// ErrJump is wrapped by the error of a call that [LimitJumps] refuses. Nothing was changed.
var ErrJump = errors.New("resource: the fencing token is too far ahead")

// LimitJumps returns s, with calls refused whose token is more than most ahead of the greatest that their key has seen. One
// token of 2^64-1, a mistake or malice, would lock a key for good. It costs a read a call, and doesn't keep out one who comes
// nearer in many steps.
//
// A new key has seen 0: let most be more than a first token. Those of etcd, Consul and ZooKeeper count all that their
// cluster does, and ZooKeeper's begin at 2^32: 1<<48 is enough for each.
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
		return fmt.Errorf("%w: %d for %q, which has seen %d, and at most %d more is let pass", ErrJump, token, key, seen, l.most)
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

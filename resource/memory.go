package resource

import (
	"bytes"
	"cmp"
	"context"
	"sync"
)

// Memory is a [Store] in memory, for tests and as the reference.
type Memory struct {
	mu      sync.Mutex
	records map[string]Record
	closed  bool
}

var (
	_ Overwriter  = (*Memory)(nil)
	_ FenceSetter = (*Memory)(nil)
)

// NewMemory returns an empty store.
func NewMemory() *Memory { return &Memory{records: map[string]Record{}} }

func (m *Memory) change(ctx context.Context, key string, invalid error, f func(rec Record, found bool) (Record, error)) (Record, error) {
	if err := cmp.Or(CheckContext(ctx), CheckKey(key), invalid); err != nil {
		return Record{}, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.closed {
		return Record{}, ErrClosed
	}
	rec, found := m.records[key]
	rec, err := f(rec, found)
	if err != nil {
		return Record{}, err
	}
	m.records[key] = rec
	return rec, nil
}

// copied clones rec's value. It needs no lock: stored values are replaced, never changed.
func copied(rec Record, err error) (Record, error) {
	rec.Value = bytes.Clone(rec.Value)
	return rec, err
}

// Write is [Store.Write].
func (m *Memory) Write(ctx context.Context, key string, f Fence, value []byte) error {
	_, err := m.change(ctx, key, CheckFence(f), func(rec Record, _ bool) (Record, error) {
		return Record{Value: append([]byte{}, value...), MaxFence: f}, rec.CheckWrite(key, f, value)
	})
	return err
}

// Overwrite is [Overwriter.Overwrite].
func (m *Memory) Overwrite(ctx context.Context, key string, f Fence, value []byte) error {
	_, err := m.change(ctx, key, CheckOffered(f), func(rec Record, _ bool) (Record, error) {
		return Record{Value: append([]byte{}, value...), MaxFence: rec.MaxFence.Max(f)}, nil
	})
	return err
}

// Read is [Store.Read].
func (m *Memory) Read(ctx context.Context, key string) (Record, error) {
	return copied(m.change(ctx, key, nil, func(rec Record, found bool) (Record, error) {
		if !found {
			return rec, ErrNotFound
		}
		return rec, nil
	}))
}

// ReadFenced is [Store.ReadFenced].
func (m *Memory) ReadFenced(ctx context.Context, key string, f Fence) (Record, error) {
	return copied(m.change(ctx, key, CheckToken(f.Token), func(rec Record, _ bool) (Record, error) {
		err := rec.CheckRead(key, f)
		rec.MaxFence = rec.MaxFence.Max(f)
		return rec, err
	}))
}

// SetFence is [FenceSetter.SetFence].
func (m *Memory) SetFence(ctx context.Context, key string, token uint64) error {
	_, err := m.change(ctx, key, CheckToken(token), func(rec Record, found bool) (Record, error) {
		if !found {
			return rec, ErrNotFound
		}
		return Record{Value: rec.Value, MaxFence: Fence{Token: token}}, nil
	})
	return err
}

// Close is [Store.Close]. The records are lost.
func (m *Memory) Close() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.closed, m.records = true, nil
	return nil
}

package resource

import (
	"bytes"
	"cmp"
	"context"
	"sync"
)

// Memory is a [Store] that keeps everything in memory, and forgets it with the process: for tests and as the
// reference for what a Store does. A resource that protects anything needs a durable store.
type Memory struct {
	mu      sync.RWMutex
	records map[string]Record
	closed  bool
}

var (
	_ Overwriter  = (*Memory)(nil)
	_ FenceSetter = (*Memory)(nil)
)

// NewMemory returns an empty store.
func NewMemory() *Memory { return &Memory{records: map[string]Record{}} }

// Write is [Store.Write].
func (m *Memory) Write(ctx context.Context, key string, f Fence, value []byte) error {
	if err := cmp.Or(CheckContext(ctx), CheckKey(key), CheckFence(f)); err != nil {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.closed {
		return ErrClosed
	}
	if err := m.records[key].CheckWrite(key, f, value); err != nil {
		return err
	}
	m.records[key] = Record{Value: append([]byte{}, value...), MaxFence: f}
	return nil
}

// Overwrite is [Overwriter.Overwrite].
func (m *Memory) Overwrite(ctx context.Context, key string, f Fence, value []byte) error {
	if err := cmp.Or(CheckContext(ctx), CheckKey(key), CheckOffered(f)); err != nil {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.closed {
		return ErrClosed
	}
	m.records[key] = Record{Value: append([]byte{}, value...), MaxFence: m.records[key].MaxFence.Max(f)}
	return nil
}

// Read is [Store.Read].
func (m *Memory) Read(ctx context.Context, key string) (Record, error) {
	if err := cmp.Or(CheckContext(ctx), CheckKey(key)); err != nil {
		return Record{}, err
	}
	m.mu.RLock()
	defer m.mu.RUnlock()
	if m.closed {
		return Record{}, ErrClosed
	}
	rec, ok := m.records[key]
	if !ok {
		return Record{}, ErrNotFound
	}
	rec.Value = bytes.Clone(rec.Value)
	return rec, nil
}

// ReadFenced is [Store.ReadFenced].
func (m *Memory) ReadFenced(ctx context.Context, key string, token uint64) (Record, error) {
	if err := cmp.Or(CheckContext(ctx), CheckKey(key), CheckToken(token)); err != nil {
		return Record{}, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.closed {
		return Record{}, ErrClosed
	}
	rec := m.records[key]
	if err := rec.CheckRead(key, token); err != nil {
		return Record{}, err
	}
	rec.MaxFence = rec.MaxFence.Max(Fence{Token: token})
	m.records[key] = rec
	rec.Value = bytes.Clone(rec.Value)
	return rec, nil
}

// SetFence is [FenceSetter.SetFence].
func (m *Memory) SetFence(ctx context.Context, key string, token uint64) error {
	if err := cmp.Or(CheckContext(ctx), CheckKey(key), CheckToken(token)); err != nil {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	rec, ok := m.records[key]
	switch {
	case m.closed:
		return ErrClosed
	case !ok:
		return ErrNotFound
	}
	rec.MaxFence = Fence{Token: token}
	m.records[key] = rec
	return nil
}

// Close is [Store.Close]. The records are gone.
func (m *Memory) Close() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.closed, m.records = true, nil
	return nil
}

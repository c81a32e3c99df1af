// Package storetest is the conformance kit for a [resource.Store]: it checks the rules in Store's comment.
//
//	func TestStore(t *testing.T) {
//		storetest.Run(t, storetest.Harness{New: func() (resource.Store, error) { return mystore.New(t.TempDir()) }})
//	}
//
// It can't check whether a reply waits for the disk: a reopened file may come from the page cache.
package storetest

import (
	"context"
	"errors"
	"fmt"
	"math/bits"
	"slices"
	"sync/atomic"
	"testing"

	"github.com/fencelab/fencelab/resource"
)

// Harness opens stores for the kit.
type Harness struct {
	// New returns an empty store for a case, which closes it.
	New func() (resource.Store, error)
	// Reopen closes or kills the store of the last New and opens it again on its data; nil if the store isn't durable.
	Reopen func(resource.Store) (resource.Store, error)
	// Another opens a second store on the same data, as another process would. Every case then uses both. Nil if only one process
	// can use the data at a time.
	Another func() (resource.Store, error)
}

// Case checks one rule in the comment of [resource.Store].
type Case struct {
	Name        string
	Rule        string
	NeedsReopen bool
	check       func(ctx context.Context, s *store)
}

// Cases returns all cases, in the order of the rules.
func Cases() []Case { return slices.Clone(cases) }

// Run runs all cases as subtests of t. A failure prints the broken rule.
func Run(t *testing.T, h Harness) {
	t.Helper()
	if h.New == nil {
		t.Fatal("storetest: Harness.New is required: it returns an empty store")
	}
	if h.Another == nil {
		t.Run("Another", func(t *testing.T) {
			t.Skip("Harness.Another is nil: no case uses two stores on the same data, so a lock within one process would do")
		})
	}
	for _, c := range cases {
		t.Run(c.Name, func(t *testing.T) {
			if c.NeedsReopen && h.Reopen == nil {
				t.Skip("Harness.Reopen is nil: the store is not durable")
			}
			if err := c.Check(t.Context(), h); err != nil {
				t.Errorf("%v\nThe rule: %s", err, c.Rule)
			}
		})
	}
}

// Check returns an error if a new store of h breaks the rule.
func (c Case) Check(ctx context.Context, h Harness) (err error) {
	s, err := h.New()
	if err != nil {
		return fmt.Errorf("Harness.New: %w", err)
	}
	st := &store{Store: s, harness: h}
	defer func() {
		p := recover()
		f, failed := p.(failure)
		if p != nil && !failed {
			panic(p)
		}
		err = errors.Join(f.error, st.Close())
	}()
	st.openAnother()
	c.check(ctx, st)
	return nil
}

// failure is the panic with which a failed check ends its case.
type failure struct{ error }

func fail(format string, args ...any) { panic(failure{fmt.Errorf(format, args...)}) }

// store is the store under test. Its methods end the case if they fail.
type store struct {
	resource.Store
	another resource.Store // on the same data; may be nil
	calls   atomic.Uint64
	harness Harness
}

func (s *store) openAnother() {
	if s.harness.Another == nil {
		return
	}
	another, err := s.harness.Another()
	if err != nil {
		fail("Harness.Another: %w", err)
	}
	s.another = another
}

func (s *store) reopen() {
	if s.another != nil {
		if err := s.another.Close(); err != nil {
			fail("Close of the other store: %w", err)
		}
	}
	reopened, err := s.harness.Reopen(s.Store)
	if err != nil {
		fail("Harness.Reopen: %w", err)
	}
	s.Store = reopened
	s.openAnother()
}

// next picks one of the two stores by the Thue-Morse sequence: each kind of call uses both, after a call of either.
func (s *store) next() resource.Store {
	if n := s.calls.Add(1); s.another != nil && bits.OnesCount64(n)%2 == 0 {
		return s.another
	}
	return s.Store
}

func (s *store) Write(ctx context.Context, key string, f resource.Fence, value []byte) error {
	return s.next().Write(ctx, key, f, value)
}

func (s *store) Read(ctx context.Context, key string) (resource.Record, error) {
	return s.next().Read(ctx, key)
}

func (s *store) ReadFenced(ctx context.Context, key string, f resource.Fence) (resource.Record, error) {
	return s.next().ReadFenced(ctx, key, f)
}

func (s *store) Close() error {
	err := s.Store.Close()
	if s.another != nil {
		err = errors.Join(err, s.another.Close())
	}
	return err
}

func (s *store) writes(ctx context.Context, key string, fences ...resource.Fence) {
	for _, f := range fences {
		s.writesValue(ctx, key, f, valueOf(f))
	}
}

func (s *store) writesValue(ctx context.Context, key string, f resource.Fence, value []byte) {
	if err := s.Write(ctx, key, f, value); err != nil {
		fail("key %.40q: Write of %.40q at %v: got %w, want it accepted", key, value, f, err)
	}
}

func (s *store) reads(ctx context.Context, key string, f resource.Fence) resource.Record {
	rec, err := s.ReadFenced(ctx, key, f)
	if err != nil {
		fail("key %.40q: ReadFenced by %v: got %w, want it accepted", key, f, err)
	}
	return rec
}

func (s *store) readsRecord(ctx context.Context, key string, want resource.Record) {
	if err := same(s.reads(ctx, key, at(want.MaxFence.Token, 0)), want); err != nil {
		fail("key %.40q: ReadFenced by %d: %w", key, want.MaxFence.Token, err)
	}
}

func (s *store) refused(ctx context.Context, key string, got resource.Fence, value []byte, applied bool) {
	before := s.record(ctx, key)
	err := s.Write(ctx, key, got, value)
	if err := isStale(err, resource.StaleTokenError{Key: key, Seen: before.MaxFence, Got: got, Applied: applied}); err != nil {
		fail("Write at %v: %w", got, err)
	}
	s.holds(ctx, key, before)
}

func (s *store) readRefused(ctx context.Context, key string, f resource.Fence) {
	before := s.record(ctx, key)
	_, err := s.ReadFenced(ctx, key, f)
	if err := isStale(err, resource.StaleTokenError{Key: key, Seen: before.MaxFence, Got: f}); err != nil {
		fail("ReadFenced by %v: %w", f, err)
	}
	s.holds(ctx, key, before)
}

func (s *store) holds(ctx context.Context, key string, want resource.Record) {
	if err := same(s.record(ctx, key), want); err != nil {
		fail("key %.40q: %w", key, err)
	}
}

// record returns the zero record for a key that doesn't exist.
func (s *store) record(ctx context.Context, key string) resource.Record {
	rec, err := s.Read(ctx, key)
	switch {
	case errors.Is(err, resource.ErrNotFound):
		return resource.Record{}
	case err != nil:
		fail("key %.40q: %w", key, err)
	}
	return rec
}

func isStale(err error, want resource.StaleTokenError) error {
	stale, ok := errors.AsType[*resource.StaleTokenError](err)
	switch {
	case !ok:
		return fmt.Errorf("got %s, want %w", text(err), &want)
	case *stale != want:
		return fmt.Errorf("got %+v, want %+v", *stale, want)
	}
	return nil
}

func same(got, want resource.Record) error {
	switch {
	case got.MaxFence != want.MaxFence:
		return fmt.Errorf("got fence %v, want %v", got.MaxFence, want.MaxFence)
	case string(got.Value) != string(want.Value):
		return fmt.Errorf("got value %.80q, want %.80q", got.Value, want.Value)
	case (got.Value == nil) != (want.Value == nil):
		return fmt.Errorf("got a nil value: %t, want %t (nil is for a key that was never written)", got.Value == nil, want.Value == nil)
	}
	return nil
}

func text(err error) string {
	if err == nil {
		return "no error"
	}
	return err.Error()
}

func at(token, seq uint64) resource.Fence { return resource.Fence{Token: token, Seq: seq} }

func valueOf(f resource.Fence) []byte { return []byte(f.String()) }

func written(f resource.Fence) resource.Record {
	return resource.Record{Value: valueOf(f), MaxFence: f}
}

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
	"slices"
	"testing"

	"github.com/fencelab/fencelab/resource"
)

// Harness opens stores for the kit.
type Harness struct {
	// New returns an empty store for a case, which closes it.
	New func() (resource.Store, error)
	// Reopen closes or kills the store of the last New and opens it again on the same data. If nil, cases that need it are
	// skipped: the store isn't durable.
	Reopen func(resource.Store) (resource.Store, error)
}

// Case checks one rule in the comment of [resource.Store].
type Case struct {
	Name        string
	Rule        string
	NeedsReopen bool
	check       func(ctx context.Context, s *store) error
}

// Cases returns all cases, in the order of the rules.
func Cases() []Case { return slices.Clone(cases) }

// Run runs all cases as subtests of t. A failure prints the broken rule.
func Run(t *testing.T, h Harness) {
	t.Helper()
	if h.New == nil {
		t.Fatal("storetest: Harness.New is required: it returns an empty store")
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
	defer func() { err = errors.Join(err, st.Close()) }()
	return c.check(ctx, st)
}

// store is the store under test, with the checks that many cases share.
type store struct {
	resource.Store
	harness Harness
}

func (s *store) reopen() error {
	reopened, err := s.harness.Reopen(s.Store)
	if err != nil {
		return fmt.Errorf("Harness.Reopen: %w", err)
	}
	s.Store = reopened
	return nil
}

// writes writes to key at each fence, with the fence's text as the value. All must be accepted.
func (s *store) writes(ctx context.Context, key string, fences ...resource.Fence) error {
	for _, f := range fences {
		if err := s.Write(ctx, key, f, valueOf(f)); err != nil {
			return fmt.Errorf("Write at %v: got %w, want it accepted", f, err)
		}
	}
	return nil
}

// refused checks that a write is refused as stale with the right error, and changes nothing.
func (s *store) refused(ctx context.Context, key string, got resource.Fence, value []byte, applied bool) error {
	before, err := s.record(ctx, key)
	if err != nil {
		return err
	}
	err = s.Write(ctx, key, got, value)
	want := resource.StaleTokenError{Key: key, Seen: before.MaxFence, Got: got, Applied: applied}
	if err := isStale(err, want); err != nil {
		return fmt.Errorf("Write at %v: %w", got, err)
	}
	return s.holds(ctx, key, before)
}

// readRefused checks the same for a fenced read.
func (s *store) readRefused(ctx context.Context, key string, token uint64) error {
	before, err := s.record(ctx, key)
	if err != nil {
		return err
	}
	_, err = s.ReadFenced(ctx, key, token)
	want := resource.StaleTokenError{Key: key, Seen: before.MaxFence, Got: resource.Fence{Token: token}}
	if err := isStale(err, want); err != nil {
		return fmt.Errorf("ReadFenced by %d: %w", token, err)
	}
	return s.holds(ctx, key, before)
}

// holds checks key's record.
func (s *store) holds(ctx context.Context, key string, want resource.Record) error {
	got, err := s.record(ctx, key)
	if err != nil {
		return err
	}
	if err := same(got, want); err != nil {
		return fmt.Errorf("key %.40q: %w", key, err)
	}
	return nil
}

// record is Read with the zero record for a key that doesn't exist.
func (s *store) record(ctx context.Context, key string) (resource.Record, error) {
	rec, err := s.Read(ctx, key)
	switch {
	case errors.Is(err, resource.ErrNotFound):
		return resource.Record{}, nil
	case err != nil:
		return resource.Record{}, fmt.Errorf("key %.40q: %w", key, err)
	case rec.Value == nil && rec.MaxFence == resource.Fence{}:
		return resource.Record{}, fmt.Errorf("key %.40q: Read got an empty record, want %w", key, resource.ErrNotFound)
	}
	return rec, nil
}

func isStale(err error, want resource.StaleTokenError) error {
	stale, ok := errors.AsType[*resource.StaleTokenError](err)
	switch {
	case !ok:
		return fmt.Errorf("got %s, want %w", text(err), &want)
	case *stale != want:
		return fmt.Errorf("got %+v, want %+v", *stale, want)
	case errors.Is(err, resource.ErrApplied) != want.Applied:
		return fmt.Errorf("errors.Is(err, ErrApplied) is %t, want %t", !want.Applied, want.Applied)
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

// text is err's message, or "no error".
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

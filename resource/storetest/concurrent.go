package storetest

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"github.com/fencelab/fencelab/resource"
)

// concurrent runs 50 holders with shuffled tokens on each of two keys; every other one reads before it writes.
func concurrent(ctx context.Context, s *store) {
	const holders = 50
	last := map[string]uint64{key: holders, "other": 1000} // tokens; the keys share none, and so no value
	var clock atomic.Int64
	run := func(key string, f resource.Fence) *Call {
		c := &Call{Fence: f, Value: valueOf(f), Begin: clock.Add(1)}
		if f.Seq == 0 {
			c.Record, c.Err = s.ReadFenced(ctx, key, f)
		} else {
			c.Err = s.Write(ctx, key, f, c.Value)
		}
		c.End = clock.Add(1)
		return c
	}

	results := map[string]chan *Call{}
	start := make(chan struct{})
	var wg sync.WaitGroup
	for _, i := range rand.New(rand.NewPCG(1, 2)).Perm(holders) {
		for key, last := range last {
			if results[key] == nil {
				results[key] = make(chan *Call, 2*holders)
			}
			token, done := last-uint64(i), results[key]
			wg.Go(func() {
				<-start
				if token%2 == 0 {
					done <- run(key, at(token, 0))
				}
				done <- run(key, at(token, 1))
			})
		}
	}
	watching, stop := context.WithCancel(ctx)
	go func() {
		wg.Wait()
		stop()
	}()
	close(start)
	defer wg.Wait()
	watch(watching, s)
	wg.Wait()

	for key, done := range results {
		close(done)
		var calls []*Call
		for c := range done {
			calls = append(calls, c)
		}
		judge(calls)
		s.holds(ctx, key, written(at(last[key], 1)))
	}
	calls := []*Call{run(key, at(holders+1, 1))}
	var took time.Duration
	token := uint64(holders + 1)
	for range 50 { // above, the greatest token may have come first, and raced with none
		token += 2
		delay := rand.N(took + 1)
		wg.Go(func() {
			<-time.After(delay)
			calls = append(calls, run(key, at(token-1, 1)))
		})
		begin := time.Now()
		read := run(key, at(token, 0))
		took = time.Since(begin)
		wg.Wait()
		calls = append(calls, read)
	}
	judge(calls)
	for range holders {
		token++
		duel(ctx, s, at(token, 1))
	}
}

func judge(calls []*Call) {
	for _, c := range calls {
		if _, refused := errors.AsType[*resource.StaleTokenError](c.Err); c.Err != nil && !refused {
			fail("%v: got %w, want it accepted or refused", c, c.Err)
		}
	}
	if err := Judge(calls); err != nil {
		fail("%w", err)
	}
}

// duel has two holders of the same token write different values. One write must be accepted, and its value stay.
func duel(ctx context.Context, s *store, f resource.Fence) {
	values := [2][]byte{[]byte("one"), []byte("other")}
	var errs [2]error
	start := make(chan struct{})
	var wg sync.WaitGroup
	for i := range values {
		wg.Go(func() {
			<-start
			errs[i] = s.Write(ctx, key, f, values[i])
		})
	}
	close(start)
	wg.Wait()
	winner, loser := 0, 1
	if errs[0] != nil {
		winner, loser = 1, 0
	}
	if errs[winner] != nil {
		fail("two Writes of different values at %v: want one of them accepted: %w", f, errors.Join(errs[:]...))
	}
	if err := isStale(errs[loser], resource.StaleTokenError{Key: key, Seen: f, Got: f}); err != nil {
		fail("two Writes of different values at %v: one was accepted, the other: %w", f, err)
	}
	s.holds(ctx, key, resource.Record{Value: values[winner], MaxFence: f})
}

// watch reads until ctx ends: the fence must never fall, and must match the value.
func watch(ctx context.Context, s *store) {
	var last resource.Fence
	for ctx.Err() == nil {
		rec := s.record(context.WithoutCancel(ctx), key)
		if rec.MaxFence.Compare(last) < 0 {
			fail("consecutive Reads: got fence %v after %v", rec.MaxFence, last)
		}
		if rec.MaxFence.Seq > 0 && string(rec.Value) != rec.MaxFence.String() {
			fail("a Read got value %q with fence %v", rec.Value, rec.MaxFence)
		}
		last = rec.MaxFence
	}
}

// Call is a call on a key between Begin and End, readings of a clock that never shows a value twice. Reads have Seq 0,
// writes don't.
type Call struct {
	Fence      resource.Fence
	Value      []byte // of a write
	Begin, End int64
	Record     resource.Record // returned by an accepted fenced read
	Err        error           // nil: accepted; a *resource.StaleTokenError: refused; any other: unknown, and it may still arrive
}

func (c *Call) String() string {
	if c.Fence.Seq == 0 {
		return fmt.Sprintf("ReadFenced by %d", c.Fence.Token)
	}
	return fmt.Sprintf("Write at %v", c.Fence)
}

// Judge returns an error if no store that keeps the rules, and so accepts calls in the order of their fences, could give these
// answers to concurrent calls on a new key. Writes with the same fence must have the same value; concurrent ones may both be
// accepted, since a store that got no reply can't tell which took effect. Judge compares calls pairwise, so it may miss what only
// three or more show.
func Judge(calls []*Call) error {
	for _, c := range calls {
		stale, refused := errors.AsType[*resource.StaleTokenError](c.Err)
		var err error
		switch {
		case refused:
			err = c.refused(*stale, calls)
		case c.Err == nil:
			err = c.accepted(calls)
		}
		if err != nil {
			return fmt.Errorf("%v: %w", c, err)
		}
	}
	return nil
}

// may reports whether a call may have taken effect. A refused fenced read may: a client library repeats it after a lost reply.
func (c *Call) may() bool {
	_, refused := errors.AsType[*resource.StaleTokenError](c.Err)
	return !refused || c.Fence.Seq == 0 || errors.Is(c.Err, resource.ErrApplied)
}

// shows returns the fence that the key had when the call was answered; zero if unknown.
func (c *Call) shows() resource.Fence {
	stale, refused := errors.AsType[*resource.StaleTokenError](c.Err)
	switch {
	case refused:
		return stale.Seen
	case c.Err != nil:
		return resource.Fence{}
	}
	return c.Fence.Max(c.Record.MaxFence)
}

// wrote returns the fence of the last write that the answer shows, the least if several wrote this value; zero if none.
func (c *Call) wrote(calls []*Call) resource.Fence {
	if f := c.shows(); f.Seq > 0 {
		return f
	}
	var least resource.Fence
	for _, w := range calls {
		if c.Record.Value != nil && w.Fence.Seq > 0 && string(w.Value) == string(c.Record.Value) && (least.Token == 0 || w.Fence.Compare(least) < 0) {
			least = w.Fence
		}
	}
	return least
}

func (c *Call) refused(stale resource.StaleTokenError, calls []*Call) error {
	admitted := resource.AdmitsWrite
	if c.Fence.Seq == 0 {
		admitted = resource.AdmitsRead
	}
	want := resource.StaleTokenError{Key: stale.Key, Seen: stale.Seen, Got: c.Fence, Applied: c.Fence.Seq > 0 && stale.Seen == c.Fence}
	if stale != want {
		return fmt.Errorf("got %+v, want %+v", stale, want)
	}
	if admitted(stale.Seen, c.Fence) {
		return fmt.Errorf("refused because of %v, which is less", stale.Seen)
	}
	for _, o := range calls {
		if o.End < c.Begin && o.shows().Compare(stale.Seen) > 0 {
			return fmt.Errorf("refused because of %v, after %v had shown %v", stale.Seen, o, o.shows())
		}
	}
	late := false
	for _, o := range calls {
		if o.may() && o.Fence == stale.Seen {
			if o.Begin < c.End {
				return nil
			}
			late = true
		}
	}
	if late {
		return fmt.Errorf("refused because of %v, which came later", stale.Seen)
	}
	return fmt.Errorf("refused because of %v, which was not accepted", stale.Seen)
}

func (c *Call) accepted(calls []*Call) error {
	read := c.Fence.Seq == 0
	var values []resource.Record
	var least resource.Fence
	for _, o := range calls {
		seen := o.shows()
		later := seen.Compare(c.Fence) > 0 && (!read || seen.Token != c.Fence.Token)
		switch {
		case later && o.End < c.Begin:
			return fmt.Errorf("accepted after %v was", o)
		case o != c && !read && o.Err == nil && o.Fence == c.Fence && o.End < c.Begin:
			return errors.New("accepted twice")
		case o.Fence.Seq == 0 || !o.may() || o.Fence.Token > c.Fence.Token || o.Begin > c.End:
			continue
		}
		values = append(values, resource.Record{Value: o.Value, MaxFence: o.Fence})
	}
	if !read {
		return nil
	}
	for _, o := range calls {
		if w := o.wrote(calls); w.Token < c.Fence.Token || o.End < c.Begin {
			least = least.Max(w)
		}
	}
	err := same(c.Record, resource.Record{MaxFence: c.Fence})
	if c.wrote(calls).Compare(least) < 0 {
		err = fmt.Errorf("got %q at %v, but there was a write at %v", c.Record.Value, c.Record.MaxFence, least)
	}
	for _, v := range values {
		if v.MaxFence.Compare(least) >= 0 && same(c.Record, resource.Record{Value: v.Value, MaxFence: v.MaxFence.Max(c.Fence)}) == nil {
			return nil
		}
	}
	return err
}

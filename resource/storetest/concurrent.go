package storetest

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"

	"github.com/fencelab/fencelab/resource"
)

// call is one of many concurrent calls on a key.
type call struct {
	fence      resource.Fence  // Seq 0: a fenced read
	begin, end int64           // readings of a clock that ticks with each
	rec        resource.Record // of an accepted fenced read
	err        error           // nil or a *StaleTokenError
}

func (c *call) String() string {
	if c.fence.Seq == 0 {
		return fmt.Sprintf("ReadFenced by %d", c.fence.Token)
	}
	return fmt.Sprintf("Write at %v", c.fence)
}

// concurrent runs 100 holders with shuffled tokens on one key, of which every other one reads before it writes. By the rules the
// store accepts calls in the order of their fences, and judge checks every answer against that.
func concurrent(ctx context.Context, s *store) {
	const holders = 100
	var clock atomic.Int64
	run := func(f resource.Fence) *call {
		c := &call{fence: f, begin: clock.Add(1)}
		if f.Seq == 0 {
			c.rec, c.err = s.ReadFenced(ctx, key, f)
		} else {
			c.err = s.Write(ctx, key, f, valueOf(f))
		}
		c.end = clock.Add(1)
		return c
	}

	results := make(chan *call, 2*holders)
	start := make(chan struct{})
	var wg sync.WaitGroup
	for _, i := range rand.New(rand.NewPCG(1, 2)).Perm(holders) {
		token := uint64(i + 1)
		wg.Go(func() {
			<-start
			if token%2 == 0 {
				results <- run(at(token, 0))
			}
			results <- run(at(token, 1))
		})
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
	close(results)

	var calls []*call
	for c := range results {
		calls = append(calls, c)
	}
	last := at(holders, 1)
	judge(calls, last)
	s.holds(ctx, key, written(last))
	for i := range uint64(holders / 2) {
		duel(ctx, s, at(holders+i+1, 1))
	}
}

// duel has two holders of the same token write different values. Exactly one must be accepted, and its value stay.
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

// watch reads until ctx ends: the fence must never fall, and the value must be that of the fence.
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

// judge checks the answers of concurrent calls on one key, each with a fence of its own; last is the greatest.
func judge(calls []*call, last resource.Fence) {
	byFence := make(map[resource.Fence]*call, len(calls))
	for _, c := range calls {
		byFence[c.fence] = c
	}
	if err := byFence[last].err; err != nil {
		fail("Write at %v, the greatest: got %w, want it accepted", last, err)
	}
	for _, c := range calls {
		stale, refused := errors.AsType[*resource.StaleTokenError](c.err)
		switch {
		case refused:
			by, ok := byFence[stale.Seen]
			want := resource.StaleTokenError{Key: key, Seen: stale.Seen, Got: c.fence}
			switch {
			case *stale != want:
				fail("%v: got %+v, want %+v", c, *stale, want)
			case resource.AdmitsWrite(stale.Seen, c.fence):
				fail("%v: refused because of %v, which is less", c, stale.Seen)
			case !ok || by.err != nil:
				fail("%v: refused because of %v, which was not accepted", c, stale.Seen)
			case by.begin > c.end:
				fail("%v: refused because of %v, which came later", c, stale.Seen)
			}
		case c.err != nil:
			fail("%v: %w", c, c.err)
		default:
			accepted(c, calls)
		}
	}
}

func accepted(c *call, calls []*call) {
	var before resource.Fence // the greatest write accepted below c
	for _, o := range calls {
		if o.err != nil {
			continue
		}
		if o.fence.Compare(c.fence) > 0 && o.end < c.begin {
			fail("%v: accepted after %v was", c, o)
		}
		if o.fence.Seq > 0 && o.fence.Compare(c.fence) < 0 {
			before = before.Max(o.fence)
		}
	}
	if c.fence.Seq > 0 {
		return
	}
	// Later writes of earlier grants are refused, so a fenced read must return the last one.
	want := resource.Record{MaxFence: c.fence}
	if before.Token > 0 {
		want.Value = valueOf(before)
	}
	if err := same(c.rec, want); err != nil {
		fail("%v: %w", c, err)
	}
}

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

// A call is one of many concurrent ones on a key. Asked and answered are readings of one clock that ticks once a
// reading, so that answered of one being less than asked of another proves their order.
type call struct {
	fence           resource.Fence // Seq 0: a fenced read
	asked, answered int64
	rec             resource.Record // what an accepted fenced read returned
	err             error           // nil or a *StaleTokenError
}

func (c *call) String() string {
	if c.fence.Seq == 0 {
		return fmt.Sprintf("ReadFenced by %d", c.fence.Token)
	}
	return fmt.Sprintf("Write at %v", c.fence)
}

// concurrent lets 100 holders with tokens in a random order loose on one key at once; every other one reads before it
// writes. No client sees in which order the store accepted. But if the rules hold, that order is the order of the
// fences, and every answer must fit it: judge says how.
func concurrent(ctx context.Context, s *store) error {
	const holders = 100
	var clock atomic.Int64
	run := func(f resource.Fence) *call {
		c := &call{fence: f, asked: clock.Add(1)}
		if f.Seq == 0 {
			c.rec, c.err = s.ReadFenced(ctx, key, f.Token)
		} else {
			c.err = s.Write(ctx, key, f, valueOf(f))
		}
		c.answered = clock.Add(1)
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
	var watchErr error
	watching, stop := context.WithCancel(ctx)
	watched := make(chan struct{})
	go func() {
		defer close(watched)
		watchErr = watch(watching, s)
	}()
	close(start)
	wg.Wait()
	stop()
	<-watched
	close(results)

	var calls []*call
	for c := range results {
		calls = append(calls, c)
	}
	last := at(holders, 1)
	return errors.Join(watchErr, judge(calls, last), s.holds(ctx, key, written(last)))
}

// watch reads until ctx ends: the fence never falls, and the value is the one that came with the fence.
func watch(ctx context.Context, s *store) error {
	var last resource.Fence
	for ctx.Err() == nil {
		rec, err := s.record(context.WithoutCancel(ctx), key)
		switch {
		case err != nil:
			return err
		case rec.MaxFence.Compare(last) < 0:
			return fmt.Errorf("consecutive Reads: got fence %v after %v", rec.MaxFence, last)
		case rec.MaxFence.Seq > 0 && string(rec.Value) != rec.MaxFence.String():
			return fmt.Errorf("a Read got value %q with fence %v", rec.Value, rec.MaxFence)
		}
		last = rec.MaxFence
	}
	return nil
}

// judge checks the answers of concurrent calls on one key, each with its own fence, whose greatest is last.
func judge(calls []*call, last resource.Fence) error {
	byFence := make(map[resource.Fence]*call, len(calls))
	for _, c := range calls {
		byFence[c.fence] = c
	}
	if err := byFence[last].err; err != nil {
		return fmt.Errorf("Write at %v, the greatest: got %w, want it accepted", last, err)
	}
	for _, c := range calls {
		stale, refused := errors.AsType[*resource.StaleTokenError](c.err)
		switch {
		case refused:
			by, ok := byFence[stale.Seen]
			want := resource.StaleTokenError{Key: key, Seen: stale.Seen, Got: c.fence}
			switch {
			case *stale != want:
				return fmt.Errorf("%v: got %+v, want %+v", c, *stale, want)
			case resource.AdmitsWrite(stale.Seen, c.fence):
				return fmt.Errorf("%v: refused because of %v, which is less", c, stale.Seen)
			case !ok || by.err != nil:
				return fmt.Errorf("%v: refused because of %v, which was not accepted", c, stale.Seen)
			case by.asked > c.answered:
				return fmt.Errorf("%v: refused because of %v, which came later", c, stale.Seen)
			}
		case c.err != nil:
			return fmt.Errorf("%v: %w", c, c.err)
		default:
			if err := accepted(c, calls); err != nil {
				return err
			}
		}
	}
	return nil
}

// accepted checks an accepted call against all others.
func accepted(c *call, calls []*call) error {
	var before resource.Fence // the greatest write accepted below c
	for _, o := range calls {
		if o.err != nil {
			continue
		}
		if o.fence.Compare(c.fence) > 0 && o.answered < c.asked {
			return fmt.Errorf("%v: accepted after %v was", c, o)
		}
		if o.fence.Seq > 0 && o.fence.Compare(c.fence) < 0 {
			before = before.Max(o.fence)
		}
	}
	if c.fence.Seq > 0 {
		return nil
	}
	// Later writes of earlier grants are refused, so that nothing may be missing from what a fenced read returns.
	want := resource.Record{MaxFence: c.fence}
	if before.Token > 0 {
		want.Value = valueOf(before)
	}
	if err := same(c.rec, want); err != nil {
		return fmt.Errorf("%v: %w", c, err)
	}
	return nil
}

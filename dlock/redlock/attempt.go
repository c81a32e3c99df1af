package redlock

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"github.com/fencelab/fencelab/dlock"
	"github.com/fencelab/fencelab/dlock/internal/wait"
)

var errLate = errors.New("redlock: the nodes took so long to reply that the lease is over")

// maxToken is the largest integer that a script can count to: Lua's numbers are doubles.
const maxToken = 1<<53 - 1

type attempt struct {
	b       *Backend
	r       dlock.Request
	keys    []string // lock and fence counter
	ttl     int64    // in ms
	number  int64    // greater than in the owner's earlier attempts
	timeout time.Duration
	start   time.Time
	renewed atomic.Pointer[time.Time] // when the last renewal that a quorum granted was sent
	nodes   []phaseOne
	undone  bool

	took, refused, failed int
	again                 bool // this owner already had the lock on a node
	token                 uint64
	own                   bool // this owner wrote token, on one node at least
	holders               map[string]int
	held                  bool        // another owner has a quorum
	frees                 []time.Time // when the leases on nodes that refused end, if they do
}

// phaseOne is the state of phase one on a node. Phase two and a release wait for it: on another connection they could overtake
// it.
type phaseOne struct {
	done    chan struct{} // closed when the request has been answered or abandoned
	refused bool          // the node has nothing of ours; valid once done is closed
}

// run makes the attempt. After dlock.ErrHeld or errLate another attempt may succeed.
func (a *attempt) run(ctx context.Context) (token uint64, err error) {
	if ctx.Err() != nil {
		return 0, ended(ctx)
	}
	a.start = time.Now() // before the requests are sent: no node starts the lease earlier
	defer func() {
		if err != nil {
			a.undo(ctx)
		}
	}()
	if err := a.lock(ctx); err != nil {
		return 0, err
	}
	token = a.token
	if !a.b.o.UnsafeCounters {
		if token, err = a.mint(ctx); err != nil {
			return 0, err
		}
	}
	if a.over() {
		return 0, errLate
	}
	return token, nil
}

// extend records a renewal sent at start. Overlapping renewals may be answered in either order.
func (a *attempt) extend(start time.Time) {
	for {
		last := a.renewed.Load()
		if last != nil && !start.After(*last) || a.renewed.CompareAndSwap(last, &start) {
			return
		}
	}
}

func (a *attempt) over() bool {
	start := a.start
	if r := a.renewed.Load(); r != nil {
		start = *r
	}
	return wait.Since(start, time.Now()) >= a.r.TTL-drift(a.r.TTL)
}

// lock is phase one: it takes the lock on a quorum and reads the counters.
func (a *attempt) lock(ctx context.Context) error {
	script := acquireScript
	if a.b.o.UnsafeCounters {
		script = unsafeScript
	}
	a.nodes = make([]phaseOne, len(a.b.nodes))
	for i := range a.nodes {
		a.nodes[i].done = make(chan struct{})
	}
	p := broadcast(ctx, a.b, a.timeout, func(ctx context.Context, i int) (vote, error) {
		defer close(a.nodes[i].done)
		v, err := acquireOn(ctx, a.b.nodes[i], script, a.keys, a.r.Owner, a.number, a.ttl)
		a.nodes[i].refused = err == nil && !v.took
		return v, err
	})
	for q := a.b.quorum; a.took < q; {
		if a.took+p.left < q {
			a.undo(ctx) // at once: others wait for these votes
			switch {
			case a.took+a.refused >= q:
				return dlock.ErrHeld
			case p.failed > len(a.nodes)-q:
				return p.unavailable()
			}
		}
		v, ok, err := p.next(ctx)
		if err != nil {
			return err
		}
		a.failed = p.failed
		if ok {
			a.count(v)
		}
	}
	return nil
}

func (a *attempt) count(v vote) {
	if v.took {
		a.took++
		a.again = a.again || v.again
	} else {
		a.refused++
		a.holders[v.holder]++
		a.held = a.held || a.holders[v.holder] >= a.b.quorum
		if v.left >= 0 {
			a.frees = append(a.frees, time.Now().Add(v.left))
		}
	}
	if v.token > a.token {
		a.token, a.own = v.token, v.own
	}
}

// mint is phase two: it writes a greater token to a quorum.
func (a *attempt) mint(ctx context.Context) (uint64, error) {
	token := a.token
	if !a.own || !a.again { // else this request is a repeat, and the token its own
		token++
	}
	for {
		if token > maxToken {
			return 0, fmt.Errorf("redlock: fence counter %s is used up: tokens go from 1 to 2^53 - 1", a.keys[1])
		}
		top, err := a.write(ctx, token)
		if err != nil {
			return 0, err
		}
		if top < token {
			return token, nil
		}
		token = top + 1 // a node outside phase one's quorum was ahead
	}
}

// write writes token to a quorum, or returns the highest counter if counters that are ahead prevent that.
func (a *attempt) write(ctx context.Context, token uint64) (top uint64, err error) {
	type reply struct {
		written
		counter uint64
	}
	p := broadcast(ctx, a.b, a.timeout, func(ctx context.Context, i int) (reply, error) {
		if err := a.nodes[i].settled(ctx); err != nil || a.nodes[i].refused {
			return reply{written: gone}, err
		}
		w, counter, err := mintOn(ctx, a.b.nodes[i], a.keys, a.r.Owner, a.number, token)
		return reply{w, counter}, err
	})
	n := map[written]int{}
	for n[accepted] < a.b.quorum {
		switch {
		case n[gone] > len(a.nodes)-a.b.quorum:
			return 0, errLate
		case n[accepted]+n[outdone]+p.left < a.b.quorum:
			return 0, p.unavailable()
		case n[accepted]+p.left < a.b.quorum && top > 0:
			return top, nil
		}
		v, ok, err := p.next(ctx)
		if err != nil {
			return 0, err
		}
		if ok {
			n[v.written]++
			top = max(top, v.counter)
		}
	}
	return 0, nil
}

// undo frees in the background what the attempt has taken or may still take.
func (a *attempt) undo(ctx context.Context) {
	if a.undone {
		return
	}
	a.undone = true
	a.b.givenUp(a)
	for i := range a.nodes {
		a.b.busy.Go(func() {
			<-a.nodes[i].done
			if a.nodes[i].refused {
				return
			}
			ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), a.timeout)
			defer cancel()
			_, _ = releaseOn(ctx, a.b.nodes[i], a.keys[0], a.r.Owner, a.number) // else the TTL does it
		})
	}
}

func (n *phaseOne) settled(ctx context.Context) error {
	select {
	case <-n.done:
		return nil
	case <-ctx.Done():
		return errNoAnswer
	}
}

// free is the earliest time at which a quorum can be free without a release, if known.
func (a *attempt) free() (time.Time, bool) {
	i := a.b.quorum - (len(a.nodes) - a.refused - a.failed) - 1
	if i < 0 || i >= len(a.frees) {
		return time.Time{}, false
	}
	slices.SortFunc(a.frees, time.Time.Compare)
	return a.frees[i], true
}

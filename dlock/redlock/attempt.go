package redlock

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/fencelab/fencelab/dlock"
)

// errLate says that a quorum was had, and was no longer good when that was known.
var errLate = errors.New("redlock: the nodes took so long to answer that the lease is over")

// maxToken is the largest number that a script can tell from the next: Lua's numbers are doubles.
const maxToken = 1<<53 - 1

// attempt is one try to take a lock: phase one takes it on a quorum of the nodes and reads their counters, phase two
// writes a greater token to a quorum. It ends as a grant, or is undone on every node.
type attempt struct {
	b       *Backend
	r       dlock.Request
	keys    []string // lock and fence counter
	ttl     int64    // in ms
	number  int64    // greater than that of every earlier attempt of the same owner
	timeout time.Duration
	start   time.Time
	nodes   []asked
	undone  bool

	// What the nodes have answered.
	took, refused, failed int
	again                 bool // a node had the lock as this owner's already
	token                 uint64
	own                   bool // token was written by this owner, and by no other
	holders               map[string]int
	frees                 []time.Time // when nodes that refused are free; not those where another has the lock for ever
	err                   error       // the first of a node
}

// asked is how far phase one is on a node. Phase two and a release come after it: on another connection they could
// overtake it, and it would leave a lock behind.
type asked struct {
	done    chan struct{} // closed when the request has been answered or given up
	refused bool          // the node said that it has nothing of ours; readable once done
}

// run returns the token of the grant. With dlock.ErrHeld and errLate another attempt may succeed.
func (a *attempt) run(ctx context.Context) (token uint64, err error) {
	if ctx.Err() != nil {
		return 0, ended(ctx)
	}
	a.start = time.Now() // before the requests leave: no node can start the lease earlier
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

// over reports whether the lease cannot be relied on any more.
func (a *attempt) over() bool { return time.Since(a.start) >= a.r.TTL-drift(a.r.TTL) }

// lock is phase one.
func (a *attempt) lock(ctx context.Context) error {
	script := acquireScript
	if a.b.o.UnsafeCounters {
		script = unsafeScript
	}
	a.nodes = make([]asked, len(a.b.nodes))
	for i := range a.nodes {
		a.nodes[i].done = make(chan struct{})
	}
	p := ask(ctx, a.b, a.timeout, func(ctx context.Context, i int) (vote, error) {
		defer close(a.nodes[i].done)
		v, err := acquireOn(ctx, a.b.nodes[i], script, a.keys, a.r.Owner, a.number, a.ttl)
		a.nodes[i].refused = err == nil && !v.took
		return v, err
	})
	q := a.b.quorum
	for a.took < q {
		if a.took+p.left < q {
			a.undo(ctx) // whatever else is to be learned, others need not wait for it
			switch {
			case a.took+a.refused >= q:
				return dlock.ErrHeld
			case a.failed > len(a.nodes)-q:
				return a.b.unavailable(a.failed, a.err)
			}
		}
		v, err := p.next(ctx)
		if err != nil {
			return err
		}
		a.count(v)
	}
	return nil
}

func (a *attempt) count(v answer[vote]) {
	if v.err != nil {
		a.failed++
		a.err = first(a.err, v.node, v.err)
		return
	}
	switch {
	case v.val.took:
		a.took++
		a.again = a.again || v.val.again
	default:
		a.refused++
		if a.holders == nil {
			a.holders = map[string]int{}
		}
		a.holders[v.val.holder]++
		if v.val.left >= 0 {
			a.frees = append(a.frees, time.Now().Add(v.val.left))
		}
	}
	switch {
	case v.val.token > a.token:
		a.token, a.own = v.val.token, v.val.own
	case v.val.token == a.token:
		a.own = a.own && v.val.own
	}
}

// mint is phase two.
func (a *attempt) mint(ctx context.Context) (uint64, error) {
	token := a.token
	if !a.own || !a.again { // else this is a repeated request, and the token its own
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
		if a.over() {
			return 0, errLate
		}
		token = top + 1 // some node knew more than the quorum of phase one
	}
}

// write has token written by a quorum. If it cannot be, because there are nodes whose counters are ahead, it returns the
// highest of these.
func (a *attempt) write(ctx context.Context, token uint64) (top uint64, err error) {
	type reply struct {
		written
		counter uint64
	}
	p := ask(ctx, a.b, a.timeout, func(ctx context.Context, i int) (reply, error) {
		if err := a.nodes[i].settled(ctx); err != nil || a.nodes[i].refused {
			return reply{written: gone}, err
		}
		w, counter, err := mintOn(ctx, a.b.nodes[i], a.keys, a.r.Owner, a.number, token)
		return reply{w, counter}, err
	})
	var n [3]int // by answer
	var failed int
	var failure error
	for n[accepted] < a.b.quorum {
		switch {
		case n[gone] > len(a.nodes)-a.b.quorum:
			return 0, errLate
		case n[accepted]+n[outdone]+p.left < a.b.quorum:
			return 0, a.b.unavailable(failed, failure)
		case n[accepted]+p.left < a.b.quorum && top > 0:
			return top, nil
		}
		v, err := p.next(ctx)
		if err != nil {
			return 0, err
		}
		if v.err != nil {
			failed++
			failure = first(failure, v.node, v.err)
			continue
		}
		n[v.val.written]++
		top = max(top, v.val.counter)
	}
	return 0, nil
}

// undo frees what the attempt has taken or may still take, in the background: ctx has often ended.
func (a *attempt) undo(ctx context.Context) {
	if a.undone {
		return
	}
	a.undone = true
	ctx = context.WithoutCancel(ctx)
	for i := range a.nodes {
		n := &a.nodes[i]
		select {
		case <-n.done:
			if n.refused {
				continue
			}
		default:
		}
		a.b.busy.Go(func() {
			<-n.done
			if n.refused {
				return
			}
			ctx, cancel := context.WithTimeout(ctx, a.timeout)
			defer cancel()
			_, _ = releaseOn(ctx, a.b.nodes[i], a.keys[0], a.r.Owner, a.number) // else the TTL does it
		})
	}
}

// settled waits until phase one is over on a node.
func (n *asked) settled(ctx context.Context) error {
	select {
	case <-n.done:
		return nil
	case <-ctx.Done():
		return errNoAnswer
	}
}

// held reports whether another owner has a quorum, as far as the nodes have answered.
func (a *attempt) held() bool {
	for _, n := range a.holders {
		if n >= a.b.quorum {
			return true
		}
	}
	return false
}

// free is the earliest time at which a quorum can be free without a release, and false if it cannot be told. Nodes that
// have not answered, and those that this attempt frees, may be free at once; those that failed are not counted on.
func (a *attempt) free() (time.Time, bool) {
	i := a.b.quorum - (len(a.nodes) - a.refused - a.failed) - 1
	if i < 0 || i >= len(a.frees) {
		return time.Time{}, false
	}
	slices.SortFunc(a.frees, time.Time.Compare)
	return a.frees[i], true
}

// first keeps the first of the nodes' errors.
func first(err error, node int, next error) error {
	if err != nil || node < 0 { // next does not know which node is late
		return err
	}
	return fmt.Errorf("node %d: %w", node, next)
}

package faults

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"

	"github.com/Shopify/toxiproxy/v2/stream"
	"github.com/Shopify/toxiproxy/v2/toxics"
)

// flow says what a direction does with what comes to it.
type flow int

const (
	pass  flow = iota // hand it on; the end of a stream closes the connection
	delay             // hand it on, in order, when the direction's delay has passed since it came
	hold              // keep it, in order, until the direction passes again
	drop              // lose it, and close the connection once the direction passes again: its stream has a hole
	shut              // lose it and close the connection at once
	stall             // of a pipe only: keep it until the last piece is written, and then do what the direction does
)

// stallTimeout bounds how long a fault waits until the pieces that pipes have handed on are written. It takes microseconds,
// unless a socket's buffer is full, or the socket is gone and nobody has noticed yet.
const stallTimeout = 10 * time.Second

// deadTimeout is how long a fault waits for the last piece of a stream that has ended: when a write fails, the proxy leaves the
// pipe with what it has.
const deadTimeout = stallTimeout / 2

// direction is a toxic that controls one direction of every connection of a link. It stays for the link's whole life: adding and
// removing the stock toxics doesn't wait for bytes on their way to a socket, and can hang when a connection has died
// (https://github.com/Shopify/toxiproxy/issues/558).
//
// A change is in force once every pipe has carried it out, between two pieces of its stream, and what it has handed on before is
// written to a socket. (Except for shut, whose caller closes the sockets.) After hold and drop nothing is written any more;
// after delay nothing is written early; after pass all that was kept has been written.
type direction struct {
	addr    string // of the link
	mu      sync.Mutex
	flow    flow
	delay   time.Duration      // if the flow is delay
	closed  bool               // shut for ever
	epoch   int                // counts the changes of flow
	faults  int                // how many there have been
	fault   int                // the number of the present one; 0: there is none
	holding bool               // a pipe has kept a piece since the flow last changed
	left    int                // pieces until loses does; 0: it doesn't
	loses   *direction         // it or the other one
	pipes   map[*pipe]struct{} // those that run
	changed chan struct{}      // closed and replaced when anything above or a pipe's epoch changes
}

// pipe is one direction of one connection. Its goroutine owns it; epoch is guarded by the direction.
type pipe struct {
	epoch  int                        // the last change that is carried out
	flow   flow                       // what it does; once shut it stays so
	delay  time.Duration              // how much later than it came a piece is handed on
	source <-chan *stream.StreamChunk // nil once the stream has ended
	ended  time.Time                  // when it has
	queue  []*stream.StreamChunk      // what is to be handed on
	unsure bool                       // the last piece that was handed on may not be written yet
}

// errFaulty is returned for a second fault in the same direction.
var errFaulty = errors.New("the link has another fault in this direction")

// errStalled is returned when a fault can't be put in force.
var errStalled = fmt.Errorf("a socket has not taken what was on its way to it for %v", stallTimeout)

// claim keeps other faults out until end, and returns the number of the one that has room now.
func (d *direction) claim() (fault int, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	switch {
	case d.closed:
		return 0, net.ErrClosed
	case d.fault != 0:
		return 0, errFaulty
	}
	d.faults++
	d.fault = d.faults
	return d.fault, nil
}

// enforce puts a fault in force that has claimed the direction. Of all flows delay alone takes one.
func (d *direction) enforce(ctx context.Context, f flow, by time.Duration) error {
	d.mu.Lock()
	if !d.closed {
		d.set(f, by)
	}
	d.mu.Unlock()
	ctx, cancel := context.WithTimeoutCause(ctx, stallTimeout, errStalled)
	defer cancel()
	return d.settle(ctx)
}

// heal ends a fault, unless it has ended, and returns once the direction passes.
func (d *direction) heal(ctx context.Context, fault int) error {
	if !d.reopen(fault) {
		return nil
	}
	if err := d.settle(ctx); err != nil {
		return err
	}
	d.end(fault)
	return nil
}

// reopen lets the direction pass again. It reports whether the fault is the present one.
func (d *direction) reopen(fault int) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.fault != fault {
		return false
	}
	if d.flow != pass && !d.closed {
		d.set(pass, 0)
	}
	return true
}

// end makes room for the next fault. Of a direction that doesn't pass yet it doesn't wait for that.
func (d *direction) end(fault int) {
	d.reopen(fault)
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.fault == fault {
		d.fault = 0
	}
}

// shut closes every connection, those to come included, for ever.
func (d *direction) shut() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.closed = true
	d.set(shut, 0)
}

// settle waits until every pipe has carried out the last change. It fails if the direction is closed.
func (d *direction) settle(ctx context.Context) error {
	return d.wait(ctx, func() (bool, error) {
		if d.closed {
			return false, net.ErrClosed
		}
		for p := range d.pipes {
			if p.epoch != d.epoch {
				return false, nil
			}
		}
		return true, nil
	})
}

// drained waits until every pipe has ended.
func (d *direction) drained(ctx context.Context) error {
	return d.wait(ctx, func() (bool, error) { return len(d.pipes) == 0, nil })
}

// wait waits until ok, called with d locked, holds or fails.
func (d *direction) wait(ctx context.Context, ok func() (bool, error)) error {
	for {
		d.mu.Lock()
		done, err := ok()
		changed := d.changed
		d.mu.Unlock()
		if done || err != nil {
			return err
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// set changes the flow, with d locked.
func (d *direction) set(f flow, by time.Duration) {
	d.flow, d.delay = f, by
	d.holding = false
	d.epoch++
	d.notify()
}

// notify wakes whoever waits for a change, with d locked.
func (d *direction) notify() {
	close(d.changed)
	d.changed = make(chan struct{})
}

// Pipe runs one direction of one connection until its stream has ended; the proxy calls it.
func (d *direction) Pipe(stub *toxics.ToxicStub) {
	p := d.join(stub)
	defer d.leave(p)
	for {
		changed := d.follow(p, stub)
		source := p.source
		var output chan<- *stream.StreamChunk
		var head *stream.StreamChunk
		var due <-chan time.Time
		wait := p.wait()
		switch {
		case p.flow == stall:
			output, head = stub.Output, barrier()
			if source == nil {
				due = time.After(deadTimeout)
			}
		case wait > 0:
			due = time.After(wait)
		case p.hands() && len(p.queue) > 0:
			source = nil // one piece at a time, so that the sender feels a slow destination
			output, head = stub.Output, p.queue[0]
		case p.hands() && source == nil:
			stub.Close()
			return
		case p.flow == shut && source == nil:
			return
		}
		select {
		case piece := <-source:
			if piece == nil {
				p.source, p.ended = nil, time.Now()
			} else {
				p.queue = append(p.queue, piece)
				d.kept(p)
			}
		case output <- head:
			p.unsure = len(head.Data) > 0
			if p.flow != stall {
				p.queue = p.queue[1:]
			}
		case <-due:
			if p.flow == stall {
				p.flow = shut
			}
		case <-changed:
		}
	}
}

// hands reports whether p hands on what comes to it.
func (p *pipe) hands() bool { return p.flow == pass || p.flow == delay }

// wait returns how long p keeps its first piece, or what is left of its stream's end, for a delay.
func (p *pipe) wait() time.Duration {
	switch {
	case p.flow != delay:
		return 0
	case len(p.queue) > 0:
		return time.Until(p.queue[0].Timestamp.Add(p.delay)) // the proxy stamps what it reads
	case p.source == nil:
		return time.Until(p.ended.Add(p.delay))
	}
	return 0
}

func (d *direction) join(stub *toxics.ToxicStub) *pipe {
	d.mu.Lock()
	defer d.mu.Unlock()
	p := &pipe{epoch: d.epoch, flow: d.flow, delay: d.delay, source: stub.Input}
	d.pipes[p] = struct{}{}
	return p
}

func (d *direction) leave(p *pipe) {
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.pipes, p)
	d.notify()
}

// follow makes p do what the direction does, and returns the channel that tells of the next change.
func (d *direction) follow(p *pipe, stub *toxics.ToxicStub) <-chan struct{} {
	d.mu.Lock()
	defer d.mu.Unlock()
	if p.epoch != d.epoch {
		switch {
		case p.flow == drop || p.flow == shut:
			p.flow = shut // whatever comes
		case (p.flow == hold || p.flow == delay) && d.flow == pass && len(p.queue) > 0:
			p.flow = pass
			p.queue = append(p.queue, barrier())
		case p.unsure && d.flow != pass && d.flow != shut:
			p.flow = stall
		default:
			p.flow, p.delay = d.flow, d.delay
			d.holding = d.holding || p.flow == hold && len(p.queue) > 0
		}
	}
	if p.flow == drop || p.flow == shut {
		p.queue = nil
	}
	if p.flow == shut {
		stub.Close()
	}
	if p.epoch != d.epoch && p.flow != stall && (p.flow != pass || len(p.queue) == 0) {
		p.epoch = d.epoch
		d.notify()
	}
	return d.changed
}

// loseFrom has other, which may be d, lose everything from the nth piece of d on.
func (d *direction) loseFrom(n int, other *direction) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.left, d.loses = n, other
}

func (d *direction) drops() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.flow == drop
}

// count is called for each piece, before it is handed on.
func (d *direction) count() {
	if d.left == 0 {
		return
	}
	if d.left--; d.left > 0 {
		return
	}
	if d.loses != d {
		d.loses.mu.Lock()
		defer d.loses.mu.Unlock()
	}
	if !d.loses.closed {
		d.loses.set(drop, 0)
	}
}

// kept notes that p has just taken a piece, and whether it keeps it.
func (d *direction) kept(p *pipe) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.count()
	if p.flow == hold && d.flow == hold && !d.holding {
		d.holding = true
		d.notify()
	}
}

// errNotHeld is returned to a caller that waits for something to be held where nothing can be.
var errNotHeld = errors.New("no hold is in force")

// held waits until a pipe holds a piece.
func (d *direction) held(ctx context.Context) error {
	return d.wait(ctx, func() (bool, error) {
		if d.flow != hold {
			return false, errNotHeld
		}
		return d.holding, nil
	})
}

// barrier returns an empty piece. The proxy takes a piece only when it has written the one before to the socket, so
// that once a barrier is taken everything ahead of it is written. (Empty, not nil: nil data ends the stream.)
func barrier() *stream.StreamChunk { return &stream.StreamChunk{Data: []byte{}} }

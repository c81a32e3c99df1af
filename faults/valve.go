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

// flow says what a valve does with what comes to it.
type flow int

const (
	pass  flow = iota // hand it on; the end of a stream closes the connection
	delay             // hand it on, in order, when the valve's delay has passed since it came
	hold              // keep it, in order, until the valve passes again
	drop              // lose it, and close the connection once the valve passes again: its stream has a hole
	shut              // lose it and close the connection at once
	stall             // of a pipe only: keep it until the last piece is written, and then do what the valve does
)

// stallTimeout bounds how long a fault waits until the pieces that pipes have handed on are written. It takes
// microseconds, unless a socket's buffer is full, or the socket is gone and nobody has noticed yet.
const stallTimeout = 10 * time.Second

// deadTimeout is for how long a fault waits for the piece of a stream that has ended. Nobody may write it: when a write
// fails, the proxy closes the connection and leaves the pipe with what it has.
const deadTimeout = stallTimeout / 2

// valve is a toxic that rules one direction of every connection of a link. It stays in place for the link's whole life
// and only changes what it does: adding and removing the stock toxics says nothing of bytes on their way to a socket,
// and can hang when a connection has died (https://github.com/Shopify/toxiproxy/issues/558).
//
// A change is in force once every pipe has carried it out, which a pipe does between two pieces of its stream. What it
// has handed on before is by then written to a socket, for the proxy may have taken a piece and not written it yet. (Not
// so with shut, whose caller closes the sockets.) After hold and drop nothing is written any more; after delay nothing is
// written early; after pass all that was kept has been written.
type valve struct {
	mu      sync.Mutex
	flow    flow
	delay   time.Duration      // if the flow is delay
	closed  bool               // shut for ever
	epoch   int                // counts the changes of flow
	faults  int                // how many there have been
	fault   int                // the number of the present one; 0: there is none
	holding bool               // a pipe has kept a piece since the flow last changed
	pipes   map[*pipe]struct{} // those that run
	changed chan struct{}      // closed and replaced when anything above or a pipe's epoch changes
}

// pipe is one direction of one connection. Its goroutine owns it; epoch is guarded by the valve.
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
func (v *valve) claim() (fault int, err error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	switch {
	case v.closed:
		return 0, net.ErrClosed
	case v.fault != 0:
		return 0, errFaulty
	}
	v.faults++
	v.fault = v.faults
	return v.fault, nil
}

// enforce puts a fault in force that has claimed the valve. Of all flows delay alone takes one.
func (v *valve) enforce(ctx context.Context, f flow, by time.Duration) error {
	v.mu.Lock()
	if !v.closed {
		v.set(f, by)
	}
	v.mu.Unlock()
	ctx, cancel := context.WithTimeoutCause(ctx, stallTimeout, errStalled)
	defer cancel()
	return v.settle(ctx)
}

// heal ends a fault, unless it has ended, and returns once the valve passes.
func (v *valve) heal(ctx context.Context, fault int) error {
	if !v.reopen(fault) {
		return nil
	}
	if err := v.settle(ctx); err != nil {
		return err
	}
	v.end(fault)
	return nil
}

// reopen lets the valve pass again. It reports whether the fault is the present one.
func (v *valve) reopen(fault int) bool {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.fault != fault {
		return false
	}
	if v.flow != pass && !v.closed {
		v.set(pass, 0)
	}
	return true
}

// end makes room for the next fault. Of a valve that doesn't pass yet it doesn't wait for that.
func (v *valve) end(fault int) {
	v.reopen(fault)
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.fault == fault {
		v.fault = 0
	}
}

// shut closes every connection, those to come included, for ever.
func (v *valve) shut() {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.closed = true
	v.set(shut, 0)
}

// settle waits until every pipe has carried out the last change. It fails if the valve is closed.
func (v *valve) settle(ctx context.Context) error {
	return v.wait(ctx, func() (bool, error) {
		if v.closed {
			return false, net.ErrClosed
		}
		for p := range v.pipes {
			if p.epoch != v.epoch {
				return false, nil
			}
		}
		return true, nil
	})
}

// drained waits until every pipe has ended.
func (v *valve) drained(ctx context.Context) error {
	return v.wait(ctx, func() (bool, error) { return len(v.pipes) == 0, nil })
}

// wait waits until ok, called with v locked, holds or fails.
func (v *valve) wait(ctx context.Context, ok func() (bool, error)) error {
	for {
		v.mu.Lock()
		done, err := ok()
		changed := v.changed
		v.mu.Unlock()
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

// set changes the flow, with v locked.
func (v *valve) set(f flow, by time.Duration) {
	v.flow, v.delay = f, by
	v.holding = false
	v.epoch++
	v.notify()
}

// notify wakes whoever waits for a change, with v locked.
func (v *valve) notify() {
	close(v.changed)
	v.changed = make(chan struct{})
}

// Pipe runs one direction of one connection until its stream has ended; the proxy calls it.
func (v *valve) Pipe(stub *toxics.ToxicStub) {
	p := v.join(stub)
	defer v.leave(p)
	for {
		changed := v.follow(p, stub)
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
				v.kept(p)
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

func (v *valve) join(stub *toxics.ToxicStub) *pipe {
	v.mu.Lock()
	defer v.mu.Unlock()
	p := &pipe{epoch: v.epoch, flow: v.flow, delay: v.delay, source: stub.Input}
	v.pipes[p] = struct{}{}
	return p
}

func (v *valve) leave(p *pipe) {
	v.mu.Lock()
	defer v.mu.Unlock()
	delete(v.pipes, p)
	v.notify()
}

// follow makes p do what the valve does, and returns the channel that tells of the next change.
func (v *valve) follow(p *pipe, stub *toxics.ToxicStub) <-chan struct{} {
	v.mu.Lock()
	defer v.mu.Unlock()
	if p.epoch != v.epoch {
		switch {
		case p.flow == drop || p.flow == shut:
			p.flow = shut // whatever comes
		case (p.flow == hold || p.flow == delay) && v.flow == pass && len(p.queue) > 0:
			p.flow = pass
			p.queue = append(p.queue, barrier())
		case p.unsure && v.flow != pass && v.flow != shut:
			p.flow = stall
		default:
			p.flow, p.delay = v.flow, v.delay
			v.holding = v.holding || p.flow == hold && len(p.queue) > 0
		}
	}
	if p.flow == drop || p.flow == shut {
		p.queue = nil
	}
	if p.flow == shut {
		stub.Close()
	}
	if p.epoch != v.epoch && p.flow != stall && (p.flow != pass || len(p.queue) == 0) {
		p.epoch = v.epoch
		v.notify()
	}
	return v.changed
}

// kept notes that p keeps what it has just taken, if it does.
func (v *valve) kept(p *pipe) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if p.flow == hold && v.flow == hold && !v.holding {
		v.holding = true
		v.notify()
	}
}

// errNotHeld is returned to who waits for something to be held where nothing can be.
var errNotHeld = errors.New("no hold is in force")

// held waits until a pipe keeps a piece.
func (v *valve) held(ctx context.Context) error {
	return v.wait(ctx, func() (bool, error) {
		if v.flow != hold {
			return false, errNotHeld
		}
		return v.holding, nil
	})
}

// barrier returns an empty piece. The proxy takes a piece only when it has written the one before to the socket, so
// that once a barrier is taken everything ahead of it is written. (Empty, not nil: nil data ends the stream.)
func barrier() *stream.StreamChunk { return &stream.StreamChunk{Data: []byte{}} }

package faults

import (
	"context"
	"errors"
	"net"
	"sync"

	"github.com/Shopify/toxiproxy/v2/stream"
	"github.com/Shopify/toxiproxy/v2/toxics"
)

// flow says what a valve does with what comes to it.
type flow int

const (
	pass flow = iota // hand it on; the end of a stream closes the connection
	hold             // keep it, in order, until the valve passes again
	drop             // lose it, and close the connection once the valve passes again: its stream has a hole
	shut             // lose it and close the connection at once; for ever
)

// valve is a toxic that rules one direction of every connection of a link. It stays in place for the link's whole life
// and only changes what it does: adding and removing the stock toxics says nothing of bytes on their way to a socket,
// and can hang when a connection has died (https://github.com/Shopify/toxiproxy/issues/558).
//
// A change is in force once every pipe has carried it out, which a pipe does between two pieces of its stream: after
// hold, drop and shut nothing leaves it any more; after pass all that it held has been written to a socket.
type valve struct {
	mu      sync.Mutex
	flow    flow
	epoch   int                // counts the changes of flow
	fault   int                // the epoch in which the present fault began; 0: there is none
	holding bool               // a pipe has kept a piece since the flow last changed
	pipes   map[*pipe]struct{} // those that run
	changed chan struct{}      // closed and replaced when anything above or a pipe's epoch changes
}

// pipe is one direction of one connection. Its goroutine owns it; epoch is guarded by the valve.
type pipe struct {
	epoch  int                        // the last change that is carried out
	flow   flow                       // what it does; once shut it stays so
	source <-chan *stream.StreamChunk // nil once the stream has ended
	queue  []*stream.StreamChunk      // what is to be handed on
}

// errFaulty is returned for a second fault in the same direction.
var errFaulty = errors.New("the link has another fault in this direction")

// inject puts a fault in force and returns its heal.
func (v *valve) inject(ctx context.Context, f flow) (Heal, error) {
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	v.mu.Lock()
	switch {
	case v.flow == shut:
		v.mu.Unlock()
		return nil, net.ErrClosed
	case v.fault != 0:
		v.mu.Unlock()
		return nil, errFaulty
	}
	v.set(f)
	fault := v.epoch
	v.fault = fault
	v.mu.Unlock()

	if err := v.settle(ctx); err != nil {
		v.end(fault)
		v.over(fault)
		return nil, err
	}
	return func(ctx context.Context) error {
		if !v.end(fault) {
			return nil
		}
		if err := v.settle(ctx); err != nil {
			return err
		}
		v.over(fault)
		return nil
	}, nil
}

// end lets the valve pass again. It reports whether the fault is the present one.
func (v *valve) end(fault int) bool {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.fault != fault {
		return false
	}
	if v.epoch == fault {
		v.set(pass)
	}
	return true
}

// over makes room for the next fault.
func (v *valve) over(fault int) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.fault == fault {
		v.fault = 0
	}
}

// shut closes every connection, those to come included.
func (v *valve) shut() {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.set(shut)
}

// settle waits until every pipe has carried out the last change. It fails if the valve is shut.
func (v *valve) settle(ctx context.Context) error {
	return v.wait(ctx, func() (bool, error) {
		if v.flow == shut {
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
func (v *valve) set(f flow) {
	v.flow = f
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
		switch {
		case p.flow == pass && len(p.queue) > 0:
			source = nil // one piece at a time, so that the sender feels a slow destination
			output, head = stub.Output, p.queue[0]
		case p.flow == pass && source == nil:
			stub.Close()
			return
		case p.flow == shut && source == nil:
			return
		}
		select {
		case piece := <-source:
			if piece == nil {
				p.source = nil
			} else {
				p.queue = append(p.queue, piece)
				v.kept(p)
			}
		case output <- head:
			p.queue = p.queue[1:]
		case <-changed:
		}
	}
}

func (v *valve) join(stub *toxics.ToxicStub) *pipe {
	v.mu.Lock()
	defer v.mu.Unlock()
	p := &pipe{epoch: v.epoch, flow: v.flow, source: stub.Input}
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
			p.flow = shut
		case p.flow == hold && v.flow == pass && len(p.queue) > 0:
			p.flow = pass
			p.queue = append(p.queue, barrier())
		default:
			p.flow = v.flow
			v.holding = v.holding || p.flow == hold && len(p.queue) > 0
		}
	}
	if p.flow == drop || p.flow == shut {
		p.queue = nil
	}
	if p.flow == shut {
		stub.Close()
	}
	if p.epoch != v.epoch && (p.flow != pass || len(p.queue) == 0) {
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

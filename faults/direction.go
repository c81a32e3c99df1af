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

type flow int

const (
	pass  flow = iota // forward; the end of a stream closes the connection
	delay             // forward in order, d.delay after arrival
	hold              // keep in order until the direction passes again
	drop              // discard, and close the connection once the direction passes again: the stream has a hole
	shut              // discard and close the connection at once
	stall             // of a pipe only: keep until the last piece is written, then follow the direction
)

// stallTimeout bounds the wait until forwarded pieces are written.
const stallTimeout = 10 * time.Second

// deadTimeout bounds the wait for an ended stream's last piece, which a failed write leaves in the pipe.
const deadTimeout = stallTimeout / 2

// direction is a toxic that controls one direction of a link. It is never removed: adding and removing the stock toxics doesn't
// wait for bytes on their way, and can hang (https://github.com/Shopify/toxiproxy/issues/558).
//
// A change is in force once every pipe has applied it and all pieces forwarded before are written to a socket (except for shut,
// whose caller closes the sockets).
type direction struct {
	addr      string
	mu        sync.Mutex
	flow      flow
	delay     time.Duration
	closed    bool
	epoch     int
	faulty    bool
	caught    bool // a piece was held or discarded since the flow last changed
	pieces    int
	remaining int // pieces until target drops; 0: never
	target    *direction
	pipes     map[*pipe]struct{}
	changed   chan struct{} // closed and replaced on changes of the above or a pipe's epoch
}

// pipe is one direction of one connection. It belongs to its goroutine, except for epoch, which the direction's mutex guards.
type pipe struct {
	epoch     int
	flow      flow // once shut, always shut
	delay     time.Duration
	source    <-chan *stream.StreamChunk // nil once the stream has ended
	ended     time.Time
	queue     []*stream.StreamChunk
	unwritten bool // the last piece forwarded may not be written yet
}

var errFaulty = errors.New("another fault of the link is in force in this direction")

var errStalled = fmt.Errorf("a socket accepted no data for %v", stallTimeout)

func (d *direction) claim() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	switch {
	case d.closed:
		return net.ErrClosed
	case d.faulty:
		return errFaulty
	}
	d.faulty = true
	return nil
}

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

func (d *direction) heal(ctx context.Context) error {
	d.reopen()
	if err := d.settle(ctx); err != nil {
		return err
	}
	d.release()
	return nil
}

func (d *direction) reopen() {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.flow != pass && !d.closed {
		d.set(pass, 0)
	}
}

// release allows the next fault. It doesn't wait until the direction passes.
func (d *direction) release() {
	d.reopen()
	d.mu.Lock()
	defer d.mu.Unlock()
	d.faulty = false
}

func (d *direction) shut() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.closed = true
	d.set(shut, 0)
}

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

func (d *direction) drained(ctx context.Context) error {
	return d.wait(ctx, func() (bool, error) { return len(d.pipes) == 0, nil })
}

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

// The caller holds d.mu.
func (d *direction) set(f flow, by time.Duration) {
	d.flow, d.delay = f, by
	d.caught = false
	d.epoch++
	d.notify()
}

// The caller holds d.mu.
func (d *direction) notify() {
	close(d.changed)
	d.changed = make(chan struct{})
}

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
		case p.forwards() && len(p.queue) > 0:
			source = nil // one piece at a time, so that the sender notices a slow destination
			output, head = stub.Output, p.queue[0]
		case p.forwards() && source == nil:
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
				d.received(p)
			}
		case output <- head:
			p.unwritten = len(head.Data) > 0
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

func (p *pipe) forwards() bool { return p.flow == pass || p.flow == delay }

func (p *pipe) catches() bool { return p.flow == hold || p.flow == drop }

// wait returns how long p keeps its first piece, or the end of its stream.
func (p *pipe) wait() time.Duration {
	switch {
	case p.flow != delay:
		return 0
	case len(p.queue) > 0:
		return time.Until(p.queue[0].Timestamp.Add(p.delay))
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

// follow applies the direction's flow to p, and returns the channel that the next change closes.
func (d *direction) follow(p *pipe, stub *toxics.ToxicStub) <-chan struct{} {
	d.mu.Lock()
	defer d.mu.Unlock()
	if p.epoch != d.epoch {
		switch {
		case p.flow == drop || p.flow == shut:
			p.flow = shut
		case (p.flow == hold || p.flow == delay) && d.flow == pass && len(p.queue) > 0:
			p.flow = pass
			p.queue = append(p.queue, barrier())
		case p.unwritten && d.flow != pass && d.flow != shut:
			p.flow = stall
		default:
			p.flow, p.delay = d.flow, d.delay
			d.caught = d.caught || p.catches() && len(p.queue) > 0
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

// loseFrom makes target, which may be d, drop everything from d's nth piece on.
func (d *direction) loseFrom(n int, target *direction) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.remaining, d.target = n, target
}

func (d *direction) drops(something bool) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.flow == drop && (d.caught || !something)
}

// The caller holds d.mu.
func (d *direction) count() {
	d.pieces++
	if d.remaining == 0 {
		return
	}
	if d.remaining--; d.remaining > 0 {
		return
	}
	if d.target != d {
		d.target.mu.Lock()
		defer d.target.mu.Unlock()
	}
	if !d.target.closed {
		d.target.set(drop, 0)
	}
}

func (d *direction) received(p *pipe) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.count()
	if p.catches() && !d.caught {
		d.caught = true
		d.notify()
	}
}

var errNotHeld = errors.New("no hold is in force")

func (d *direction) held(ctx context.Context) error {
	return d.wait(ctx, func() (bool, error) {
		if d.flow != hold {
			return false, errNotHeld
		}
		return d.caught, nil
	})
}

// barrier returns an empty piece (nil data would end the stream). The proxy takes it only after writing all earlier pieces.
func barrier() *stream.StreamChunk { return &stream.StreamChunk{Data: []byte{}} }

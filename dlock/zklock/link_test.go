package zklock_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"io"
	"math"
	"net"
	"runtime/pprof"
	"strings"
	"sync"
	"time"

	"github.com/google/uuid"

	"github.com/fencelab/fencelab/dlock/dlocktest"
	"github.com/fencelab/fencelab/dlock/internal/locktest"
)

const (
	opCreate          = 1
	opDelete          = 2
	opExists          = 3
	opGetData         = 4
	opSetData         = 5
	opPing            = 11
	opGetChildren     = 12
	opCreateContainer = 19
	opAuth            = 100
	opSetWatches      = 101
	opClose           = -11
)

// link loses calls, and loses or holds the replies to writes. Unless it is cut, handshakes, heartbeats and renewed watches pass.
type link struct {
	addr string
	name string // labels the client's goroutines

	mu     sync.Mutex
	fault  fault
	op     int32 // for loseOneReply
	held   chan struct{}
	lost   int             // calls without request or reply
	pause  time.Duration   // before the client reconnects, as for a slow DNS
	refuse map[int32]int32 // reply codes by kind of call
	mute   string          // prefix of watched paths whose events are lost, unless empty
	before func(op int32)  // called before a call is sent, unless nil
	calls  map[int32]int
	conns  map[*conn]struct{}
	watch  map[string]struct{}
	id     int64         // the session's
	agrees time.Duration // the session timeout that the client is told, unless 0
	passwd []byte        // the session's
}

type fault int

const (
	none fault = iota
	loseRequests
	loseReplies
	loseOneReply
	holdReplies
	cut
)

func newLink(addr string) *link {
	return &link{addr: addr, name: uuid.NewString(), calls: map[int32]int{}, refuse: map[int32]int32{}, conns: map[*conn]struct{}{}, watch: map[string]struct{}{}}
}

func (l *link) faults() dlocktest.Link {
	faults := locktest.Link(func(f fault) func() { return l.inject(f, 0) }, loseRequests, loseReplies, holdReplies, cut)
	faults.Refuse = func() (heal func()) {
		l.refuses(opCreate, overQuota)
		return func() { l.refuses(opCreate, 0) }
	}
	return faults
}

func (l *link) inject(f fault, op int32) (heal func()) {
	l.mu.Lock()
	defer l.mu.Unlock()
	held := make(chan struct{})
	l.fault, l.op, l.held = f, op, held
	return sync.OnceFunc(func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		l.fault = none
		close(held)
	})
}

func (l *link) is(f fault) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.fault == f
}

// refuses sets the reply code to deletes or creates; 0: the server's.
func (l *link) refuses(op, code int32) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.refuse[op] = code
}

func (l *link) muffle(prefix string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.mute = prefix
}

func (l *link) once(op int32, f func()) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.before = func(o int32) {
		if o == op {
			l.mu.Lock()
			l.before = nil
			l.mu.Unlock()
			f()
		}
	}
}

func (l *link) losses() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.lost
}

// sent counts calls of op, or all if it is 0.
func (l *link) sent(op int32) (n int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for o, m := range l.calls {
		if op == 0 || op == o {
			n += m
		}
	}
	return n
}

func (l *link) drop() {
	l.mu.Lock()
	conns := make([]*conn, 0, len(l.conns))
	for c := range l.conns {
		conns = append(conns, c)
	}
	l.mu.Unlock()
	for _, c := range conns {
		_ = c.Close()
	}
}

var errRefused = &net.OpError{Op: "dial", Net: "tcp", Err: errors.New("cut")}

func (l *link) Dial(network, _ string, timeout time.Duration) (net.Conn, error) {
	if l.is(cut) {
		return nil, errRefused
	}
	nc, err := (&net.Dialer{Timeout: timeout}).DialContext(context.Background(), network, l.addr)
	if err != nil {
		return nil, err
	}
	c := &conn{Conn: nc, l: l, call: map[int32]request{}, closed: make(chan struct{})}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.conns[c] = struct{}{}
	c.rewatches = len(l.watch) > 0
	return c, nil
}

// A zk.HostProvider, since the default one waits for a second before it reconnects to the only server.

func (l *link) Init([]string) error { return nil }
func (l *link) Len() int            { return 1 }
func (l *link) Next() (addr string, _ bool) {
	l.mu.Lock()
	pause := l.pause
	l.mu.Unlock()
	time.Sleep(pause)
	return l.addr, l.is(cut)
}
func (l *link) Connected() {}

// conn carries frames: a length and so many bytes, in one write.
type conn struct {
	net.Conn
	l         *link
	greeted   bool // the first frame has been sent
	welcomed  bool // and answered
	rest      []byte
	rewatches bool // the client may have watches to set again
	rewrote   bool // it has; for the writer
	doomed    bool // breaks once it has
	ready     bool // the client is past that point; for the reader
	closeOnce sync.Once
	closed    chan struct{}

	mu   sync.Mutex
	call map[int32]request // in flight, by number
}

type request struct {
	op     int32
	watch  string
	refuse int32 // reply code, unless 0
}

func (c *conn) Close() error {
	c.closeOnce.Do(func() {
		c.l.mu.Lock()
		delete(c.l.conns, c)
		c.l.mu.Unlock()
		close(c.closed)
	})
	return c.Conn.Close()
}

func (c *conn) Write(b []byte) (int, error) {
	if !c.greeted {
		c.greeted = true
		if c.l.is(cut) {
			return 0, c.breaks()
		}
		return c.Conn.Write(b)
	}
	xid, op := int32(binary.BigEndian.Uint32(b[4:])), int32(binary.BigEndian.Uint32(b[8:]))
	call := op != opPing && op != opAuth && op != opClose && op != opSetWatches
	c.l.mu.Lock()
	f, before, refuse := c.l.fault, c.l.before, c.l.refuse[op]
	if call {
		c.l.calls[op]++
	}
	c.l.mu.Unlock()
	if call && before != nil {
		before(op)
	}
	c.rewrote = c.rewrote || op == opSetWatches
	switch lost := f == cut || f == loseRequests && call; {
	case (lost || c.doomed) && c.rewatches && !c.rewrote: // not before it has set its watches; see waitReady
		if !c.doomed {
			c.doomed = true
			time.AfterFunc(time.Second, func() { _ = c.Close() }) // in case it didn't know of the watch yet
		}
		return len(b), nil
	case lost || c.doomed:
		return 0, c.breaks()
	case !call:
		return c.Conn.Write(b)
	}
	if refuse != 0 { // the server finds another version of the node, or a mode that it doesn't know
		b = binary.BigEndian.AppendUint32(bytes.Clone(b[:len(b)-4]), math.MaxInt32)
	}
	c.mu.Lock()
	c.call[xid] = request{op, watched(op, b[12:]), refuse}
	c.mu.Unlock()
	return c.Conn.Write(b)
}

func (c *conn) Read(b []byte) (int, error) {
	if len(c.rest) == 0 {
		frame, err := c.next()
		if err != nil {
			return 0, err
		}
		c.rest = frame
	}
	n := copy(b, c.rest)
	c.rest = c.rest[n:]
	return n, nil
}

// next returns a frame when it may arrive.
func (c *conn) next() ([]byte, error) {
	head := make([]byte, 4)
	if _, err := io.ReadFull(c.Conn, head); err != nil {
		return nil, err
	}
	frame := append(head, make([]byte, binary.BigEndian.Uint32(head))...)
	if _, err := io.ReadFull(c.Conn, frame[4:]); err != nil {
		return nil, err
	}
	if !c.welcomed {
		c.welcomed = true
		c.l.mu.Lock()
		c.l.id, c.l.passwd = int64(binary.BigEndian.Uint64(frame[12:])), frame[24:40]
		if c.l.agrees > 0 {
			binary.BigEndian.PutUint32(frame[8:], uint32(c.l.agrees.Milliseconds()))
		}
		c.l.mu.Unlock()
		return frame, nil
	}
	if c.rewatches && !c.ready {
		c.waitReady()
		c.ready = true
	}
	xid := int32(binary.BigEndian.Uint32(frame[4:]))
	c.mu.Lock()
	call := c.call[xid]
	delete(c.call, xid)
	c.mu.Unlock()
	if call.refuse != 0 {
		binary.BigEndian.PutUint32(frame[16:], uint32(call.refuse))
	}
	op, good := call.op, binary.BigEndian.Uint32(frame[16:]) == 0
	if call.watch != "" && !c.ready {
		c.waitReady()
		c.ready = true
	}
	// Only a write's reply makes a difference. A create that fails needs its parent first.
	write := op == opSetData || op == opDelete || op == opCreate && good
	c.l.mu.Lock()
	f, held, mute := c.l.fault, c.l.held, c.l.mute
	muted := false
	switch {
	case xid == -1: // a watch has fired: header, type, state, path
		path := text(frame[28:])
		delete(c.l.watch, path)
		muted = mute != "" && strings.HasPrefix(path, mute)
	case good && call.watch != "":
		c.l.watch[call.watch] = struct{}{}
	}
	switch {
	case f == loseOneReply && good && op == c.l.op:
		c.l.fault, f, write = none, loseReplies, true
	case f == loseOneReply:
		f = none
	}
	c.l.mu.Unlock()
	switch {
	case muted:
		return c.next()
	case f == cut, f == loseReplies && write:
		return nil, c.breaks()
	case f == holdReplies && write:
		select {
		case <-held:
		case <-c.closed:
			return nil, net.ErrClosed
		}
	}
	return frame, nil
}

func watched(op int32, b []byte) string {
	if path := text(b); (op == opGetData || op == opGetChildren) && b[4+len(path)] != 0 {
		return path
	}
	return ""
}

func text(b []byte) string { return string(b[4 : 4+binary.BigEndian.Uint32(b)]) }

func (l *link) watches(prefix string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	for path := range l.watch {
		if strings.HasPrefix(path, prefix) {
			return true
		}
	}
	return false
}

// waitReady waits until the client has set its watches again. An earlier reply would race with that, since the client reads the
// last zxid without a lock.
func (c *conn) waitReady() {
	var profile bytes.Buffer
	for {
		profile.Reset()
		_ = pprof.Lookup("goroutine").WriteTo(&profile, 1)
		for stack := range strings.SplitSeq(profile.String(), "\n\n") {
			if strings.Contains(stack, c.l.name) && strings.Contains(stack, "zk.(*Conn).loop+") && strings.Contains(stack, "WaitGroup).Wait+") {
				return
			}
		}
		select {
		case <-time.After(time.Millisecond):
		case <-c.closed:
			return
		}
	}
}

func (c *conn) breaks() error {
	c.l.mu.Lock()
	c.l.lost++
	c.l.mu.Unlock()
	_ = c.Close()
	return &net.OpError{Op: "link", Net: "tcp", Err: net.ErrClosed} // as if the other side had closed
}

// endSession ends a cut-off client's session from another connection.
func (l *link) endSession(ctx context.Context) error {
	l.mu.Lock()
	id, passwd := l.id, l.passwd
	l.mu.Unlock()
	c, err := (&net.Dialer{}).DialContext(ctx, "tcp", l.addr)
	if err != nil {
		return err
	}
	defer func() { _ = c.Close() }()
	hello := make([]byte, 0, 64)
	hello = binary.BigEndian.AppendUint32(hello, 44)
	hello = binary.BigEndian.AppendUint32(hello, 0)
	hello = binary.BigEndian.AppendUint64(hello, 0)
	hello = binary.BigEndian.AppendUint32(hello, uint32(maxTimeout.Milliseconds()))
	hello = binary.BigEndian.AppendUint64(hello, uint64(id))
	hello = binary.BigEndian.AppendUint32(hello, uint32(len(passwd)))
	hello = append(hello, passwd...)
	bye := binary.BigEndian.AppendUint32(nil, 8)
	bye = binary.BigEndian.AppendUint32(bye, 1)
	bye = binary.BigEndian.AppendUint32(bye, uint32(0xffffffff-10)) // opClose, -11
	welcome := make([]byte, 4+37)
	if _, err := c.Write(hello); err != nil {
		return err
	}
	if _, err := io.ReadFull(c, welcome[:40]); err != nil {
		return err
	}
	if got := int64(binary.BigEndian.Uint64(welcome[12:])); got != id {
		return errors.New("the session has ended already")
	}
	if _, err := c.Write(bye); err != nil {
		return err
	}
	_, err = io.Copy(io.Discard, c) // answers, and closes
	return err
}

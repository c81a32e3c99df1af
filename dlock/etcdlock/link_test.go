package etcdlock_test

import (
	"bytes"
	"context"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/fencelab/fencelab/dlock/dlocktest"
)

// link stands between a client and its etcd and disturbs calls.
type link struct {
	mu      sync.Mutex
	fault   fault
	changed chan struct{} // closed when the fault ends
	broken  chan struct{} // closed when what is open breaks
	calls   map[string]int
	watches int           // asked for
	opened  int           // of these
	events  int           // that watches have told
	writes  int           // transactions that could write
	kept    []time.Time   // when keep-alives left
	late    chan struct{} // closed when a request that was held has arrived
	after   func()        // if not nil, called once, when a transaction has been answered
	refuse  int           // so many transactions are
	answers int           // to transactions
	members []uint64      // who has answered transactions, and told what a watch saw

	sent       *grpc.ClientConn // by which the last transaction went
	watched    *grpc.ClientConn // by which the last watch of an inbox was asked for
	heard      *grpc.ClientConn // by which a watch has told something last
	silent     *grpc.ClientConn // what is sent by this one gets no answer
	leaderless *grpc.ClientConn // and this one leads to a member that knows no leader
}

type fault int

const (
	none fault = iota
	loseRequests
	loseReplies
	holdReplies
	cut
	holdOneRequest
	cutKeepAlives // only these
	cutWatches    // only these
	blind         // reads fail
	deaf          // and watches, too
	forgetLeases  // as transactions find out
	delayOneRequest
	silence
	leaderlessness
)

const (
	keepAlive = "/etcdserverpb.Lease/LeaseKeepAlive"
	watch     = "/etcdserverpb.Watch/Watch"
	txn       = "/etcdserverpb.KV/Txn"
	read      = "/etcdserverpb.KV/Range"
)

// cuts reports whether f breaks streams of a method.
func (f fault) cuts(method string) bool {
	switch f {
	case cut, loseRequests, loseReplies:
		return true
	case cutKeepAlives:
		return method == keepAlive
	case cutWatches, deaf:
		return method == watch
	default:
		return false
	}
}

func newLink() *link {
	return &link{changed: make(chan struct{}), broken: make(chan struct{}), calls: map[string]int{}, late: make(chan struct{})}
}

func (l *link) faults() dlocktest.Link {
	inject := func(f fault) func() (heal func()) {
		return func() func() { return l.inject(f) }
	}
	return dlocktest.Link{
		LoseRequests: inject(loseRequests),
		LoseReplies:  inject(loseReplies),
		HoldReplies:  inject(holdReplies),
		Cut:          inject(cut),
	}
}

// inject makes f the fault until heal is called. A fault that loses messages breaks open streams.
func (l *link) inject(f fault) (heal func()) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.fault = f
	close(l.broken)
	l.broken = make(chan struct{})
	return sync.OnceFunc(func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		l.fault = none
		close(l.changed)
		l.changed = make(chan struct{})
	})
}

func (l *link) now() (f fault, changed, broken <-chan struct{}) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.fault, l.changed, l.broken
}

// holdAnswer holds back the next transaction's answer until deliver is called. answered is closed when there is one.
func (l *link) holdAnswer() (answered <-chan struct{}, deliver func()) {
	there, gate := make(chan struct{}), make(chan struct{})
	l.mu.Lock()
	defer l.mu.Unlock()
	l.after = func() {
		close(there)
		<-gate
	}
	return there, sync.OnceFunc(func() { close(gate) })
}

// whatIsAfter returns what is to be done after a call of a method, which is done once.
func (l *link) whatIsAfter(method string) (after func()) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if method == txn {
		after, l.after = l.after, nil
	}
	return after
}

// counts returns how many calls there were of a method, how many watches, and how many events they told.
func (l *link) counts(method string) (calls, watches, events int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.calls[method], l.watches, l.events
}

// openedWatches returns how many watches etcd has opened.
func (l *link) openedWatches() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.opened
}

// keptAlive returns when keep-alives left.
func (l *link) keptAlive() []time.Time {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Clone(l.kept)
}

var errLink = status.Error(codes.Unavailable, "broken link")

// answered notes which member an answer is of.
func (l *link) answered(answer any) {
	var h *pb.ResponseHeader
	switch a := answer.(type) {
	case *pb.TxnResponse:
		h = a.Header
		l.mu.Lock()
		l.answers++
		l.mu.Unlock()
	case *pb.WatchResponse:
		if len(a.Events) > 0 {
			h = a.Header
		}
	}
	if h == nil {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.members = append(l.members, h.MemberId)
}

// whoAnswered returns the members that answered since the last call.
func (l *link) whoAnswered() (members []uint64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	members, l.members = l.members, nil
	return members
}

func (l *link) unary(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoke grpc.UnaryInvoker, opts ...grpc.CallOption) error {
	l.mu.Lock()
	l.calls[method]++
	if r, ok := req.(*pb.TxnRequest); ok && slices.ContainsFunc(slices.Concat(r.Success, r.Failure), func(o *pb.RequestOp) bool {
		return o.GetRequestRange() == nil
	}) {
		l.writes++
	}
	f, changed := l.fault, l.changed
	if method == txn {
		l.sent = cc
	}
	switch cc {
	case l.silent:
		f = silence
	case l.leaderless:
		f = leaderlessness
	}
	switch {
	case method == txn && l.refuse > 0:
		l.refuse--
		f = cut
	case f == holdOneRequest || f == delayOneRequest:
		l.fault = none
	}
	l.mu.Unlock()
	switch f {
	case loseRequests, cut:
		return errLink
	case blind, deaf:
		if method == read {
			return errLink
		}
	case forgetLeases:
		if method == txn {
			return rpctypes.ErrGRPCLeaseNotFound
		}
	case delayOneRequest:
		<-changed
	case leaderlessness:
		return rpctypes.ErrGRPCNoLeader
	case silence:
		<-ctx.Done()
		return status.FromContextError(ctx.Err()).Err()
	case holdOneRequest: // it arrives late, whatever its sender has done meanwhile
		go func() {
			<-changed
			_ = invoke(context.WithoutCancel(ctx), method, req, &pb.TxnResponse{}, cc)
			close(l.late)
		}()
		<-ctx.Done()
		return status.FromContextError(ctx.Err()).Err()
	default: // nothing happens to it
	}
	err := invoke(ctx, method, req, reply, cc, opts...)
	if err == nil {
		l.answered(reply)
	}
	if after := l.whatIsAfter(method); after != nil {
		after()
	}
	switch f, changed, _ := l.now(); f {
	case loseReplies, cut:
		return errLink
	case holdReplies:
		select {
		case <-changed:
		case <-ctx.Done():
			return status.FromContextError(ctx.Err()).Err()
		}
	default:
	}
	return err
}

// stream breaks streams. The client library reads and writes them when it likes, so they break by their contexts.
func (l *link) stream(
	ctx context.Context, desc *grpc.StreamDesc, cc *grpc.ClientConn, method string, open grpc.Streamer, opts ...grpc.CallOption,
) (grpc.ClientStream, error) {
	f, _, broken := l.now()
	if f.cuts(method) {
		return nil, errLink
	}
	ctx, cancel := context.WithCancel(ctx)
	s, err := open(ctx, desc, cc, method, opts...)
	if err != nil {
		cancel()
		return nil, err
	}
	st := &stream{ClientStream: s, l: l, cc: cc, cancel: cancel}
	go func() {
		for ctx.Err() == nil {
			f, _, next := l.now()
			if err := l.breaks(f, method, cc); err != nil {
				st.cut.Store(&err)
				cancel()
			}
			select {
			case <-broken:
			case <-ctx.Done():
			}
			broken = next
		}
	}()
	return st, nil
}

// breaks is the error of streams that break.
func (l *link) breaks(f fault, method string, cc *grpc.ClientConn) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case f.cuts(method):
		return errLink
	case method == watch && l.leaderless == cc:
		return rpctypes.ErrGRPCNoLeader
	}
	return nil
}

// told returns how many transactions were answered, and how many events watches have told.
func (l *link) told() (answers, events int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.answers, l.events
}

// by returns the connections by which the last transaction went, and by which a watch has told something last.
func (l *link) by() (sent, heard *grpc.ClientConn) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.sent, l.heard
}

// watchedBy returns the connection by which an inbox was asked for last.
func (l *link) watchedBy() *grpc.ClientConn {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.watched
}

type stream struct {
	grpc.ClientStream
	l      *link
	cc     *grpc.ClientConn
	cancel context.CancelFunc
	cut    atomic.Pointer[error]
}

func (s *stream) SendMsg(m any) error {
	if r, ok := m.(*pb.WatchRequest); ok && r.GetCreateRequest() != nil {
		s.l.mu.Lock()
		s.l.watches++
		if bytes.Contains(r.GetCreateRequest().Key, []byte("turn/")) {
			s.l.watched = s.cc
		}
		s.l.mu.Unlock()
	}
	if _, ok := m.(*pb.LeaseKeepAliveRequest); ok {
		s.l.mu.Lock()
		s.l.kept = append(s.l.kept, time.Now())
		s.l.mu.Unlock()
	}
	return s.ClientStream.SendMsg(m)
}

func (s *stream) RecvMsg(m any) error {
	err := s.ClientStream.RecvMsg(m)
	cut := s.cut.Load()
	switch r, ok := m.(*pb.WatchResponse); {
	case cut != nil:
		return *cut
	case err != nil:
		s.cancel()
	case ok:
		s.l.mu.Lock()
		s.l.events += len(r.Events)
		if r.Created && !r.Canceled {
			s.l.opened++
		}
		if len(r.Events) > 0 {
			s.l.heard = s.cc
		}
		s.l.mu.Unlock()
		s.l.answered(r)
	}
	return err
}

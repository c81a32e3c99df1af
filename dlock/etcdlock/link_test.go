package etcdlock_test

import (
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
	"github.com/fencelab/fencelab/dlock/internal/locktest"
)

type link struct {
	mu      sync.Mutex
	fault   fault
	changed chan struct{}  // closed when the fault ends
	broken  chan struct{}  // closed when open streams break
	calls   map[string]int // by method, and other counts
	writes  int
	kept    []time.Time              // when keep-alives were sent
	late    chan struct{}            // closed when a held request has arrived
	after   func()                   // called once, after a transaction
	refuse  int                      // transactions to refuse
	undone  map[string]chan struct{} // by a key's value: its deletion was answered
	deliver chan struct{}            // lets one keep-alive's reply pass
}

type fault int

const (
	none fault = iota
	loseRequests
	loseReplies
	holdReplies
	cut
	holdOneRequest
	cutKeepAlives
	holdKeepAlives // their replies, until one is asked for
	cutWatches
	blind        // reads fail
	deaf         // and watches, too
	forgetLeases // as seen by transactions
	delayOneRequest
	answerLate // puts are answered once undone
	sendLate   // and sent only then
	undoLost   // the first put is answered when its deletion was lost once; that is lost three times
	undoNever  // that is always lost
	holdGrant  // one request for a session isn't answered
	fillDisk   // a put is applied, and answered that there is no space, as when it crosses etcd's quota
	fullDisk   // puts are refused
)

const (
	keepAlive = "/etcdserverpb.Lease/LeaseKeepAlive"
	watch     = "/etcdserverpb.Watch/Watch"
	txn       = "/etcdserverpb.KV/Txn"
	grant     = "/etcdserverpb.Lease/LeaseGrant"
	read      = "/etcdserverpb.KV/Range"
	watches   = "watches"          // requested
	fromNow   = "watches from now" // without a revision
	opened    = "opened"
	events    = "events" // received by watches
)

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
	return &link{changed: make(chan struct{}), broken: make(chan struct{}), calls: map[string]int{}, late: make(chan struct{}), undone: map[string]chan struct{}{}, deliver: make(chan struct{})}
}

func (l *link) faults() dlocktest.Link {
	faults := locktest.Link(l.inject, loseRequests, loseReplies, holdReplies, cut)
	faults.Refuse = func() (heal func()) { return l.inject(fullDisk) }
	return faults
}

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

// holdAnswer delays the next transaction's reply until deliver is called. answered is closed when there is one.
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

func (l *link) whatIsAfter(method string) (after func()) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if method == txn {
		after, l.after = l.after, nil
	}
	return after
}

// sent counts a method's calls, or watches, opened or events.
func (l *link) sent(what string) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.calls[what]
}

// requests counts all but keep-alives.
func (l *link) requests() (n int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for method, calls := range l.calls {
		if method == watches || method[0] == '/' && method != watch && method != keepAlive {
			n += calls
		}
	}
	return n
}

func (l *link) keptAlive() []time.Time {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Clone(l.kept)
}

var errLink = status.Error(codes.Unavailable, "broken link")

func (l *link) unary(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoke grpc.UnaryInvoker, opts ...grpc.CallOption) error {
	l.mu.Lock()
	l.calls[method]++
	if r, ok := req.(*pb.TxnRequest); ok && slices.ContainsFunc(slices.Concat(r.Success, r.Failure), func(o *pb.RequestOp) bool {
		return o.GetRequestRange() == nil
	}) {
		l.writes++
	}
	f, changed := l.fault, l.changed
	switch {
	case method == txn && l.refuse > 0:
		l.refuse--
		f = cut
	case f == holdOneRequest || f == delayOneRequest || f == holdGrant && method == grant:
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
	case fullDisk:
		if r, ok := req.(*pb.TxnRequest); ok && puts(r) {
			return rpctypes.ErrGRPCNoSpace
		}
	case delayOneRequest:
		<-changed
	case holdOneRequest: // it arrives late, whatever its sender does
		go func() {
			<-changed
			_ = invoke(context.WithoutCancel(ctx), method, req, &pb.TxnResponse{}, cc)
			close(l.late)
		}()
		<-ctx.Done()
		return status.FromContextError(ctx.Err()).Err()
	case sendLate:
		if r, ok := req.(*pb.TxnRequest); ok && !undoes(r) {
			l.untilUndone(ctx, r)
		}
	case undoLost, undoNever:
		if r, ok := req.(*pb.TxnRequest); ok && undoes(r) {
			if l.lost(3) && f == undoLost {
				l.inject(none)
			}
			l.untilUndone(ctx, r)
			return errLink
		}
	case holdGrant:
		if method == grant {
			<-ctx.Done()
			return status.FromContextError(ctx.Err()).Err()
		}
	default:
	}
	err := invoke(ctx, method, req, reply, cc, opts...)
	if after := l.whatIsAfter(method); after != nil {
		after()
	}
	switch f, changed, _ := l.now(); f {
	case loseReplies, cut:
		return errLink
	case fillDisk:
		if r, ok := req.(*pb.TxnRequest); ok && err == nil && puts(r) {
			return rpctypes.ErrGRPCNoSpace
		}
	case answerLate, sendLate, undoLost, undoNever:
		if r, ok := req.(*pb.TxnRequest); ok && (f == answerLate || undoes(r) || f >= undoLost && l.first()) {
			l.untilUndone(ctx, r)
		}
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

func (l *link) first() bool {
	return l.sent("late") == 0
}

func (l *link) lost(n int) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.calls["lost"]++
	return l.calls["lost"] == n
}

// untilUndone delays a put until its key's deletion has been answered; the deletion calls it too.
func (l *link) untilUndone(ctx context.Context, r *pb.TxnRequest) {
	undone := func(value []byte) chan struct{} {
		l.mu.Lock()
		defer l.mu.Unlock()
		if l.undone[string(value)] == nil {
			l.undone[string(value)] = make(chan struct{}, 1)
		}
		return l.undone[string(value)]
	}
	if undoes(r) {
		select {
		case undone(r.Compare[0].GetValue()) <- struct{}{}:
		default: // a repeated deletion
		}
		return
	}
	l.mu.Lock()
	l.calls["late"]++
	l.mu.Unlock()
	select {
	case <-undone(r.Success[len(r.Success)-1].GetRequestPut().Value):
	case <-ctx.Done():
	}
}

func undoes(r *pb.TxnRequest) bool { return len(r.Compare[0].GetValue()) > 0 }

func puts(r *pb.TxnRequest) bool {
	return slices.ContainsFunc(slices.Concat(r.GetSuccess(), r.GetFailure()), func(o *pb.RequestOp) bool {
		return o.GetRequestPut() != nil || puts(o.GetRequestTxn())
	})
}

// stream breaks streams by their contexts, since the client library may use them at any time.
func (l *link) stream(
	ctx context.Context, desc *grpc.StreamDesc, cc *grpc.ClientConn, method string, open grpc.Streamer, opts ...grpc.CallOption,
) (grpc.ClientStream, error) {
	l.mu.Lock()
	l.calls[method]++
	l.mu.Unlock()
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
	st := &stream{ClientStream: s, l: l, cancel: cancel}
	go func() {
		for ctx.Err() == nil {
			f, _, next := l.now()
			if f.cuts(method) {
				st.cut.Store(true)
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

func is[T any](m any) bool {
	_, ok := m.(T)
	return ok
}

type stream struct {
	grpc.ClientStream
	l      *link
	cancel context.CancelFunc
	cut    atomic.Bool
}

func (s *stream) SendMsg(m any) error {
	if r, ok := m.(*pb.WatchRequest); ok && r.GetCreateRequest() != nil {
		s.l.mu.Lock()
		s.l.calls[watches]++
		if r.GetCreateRequest().StartRevision == 0 {
			s.l.calls[fromNow]++
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
	if f, changed, _ := s.l.now(); f == holdKeepAlives && is[*pb.LeaseKeepAliveResponse](m) {
		select {
		case <-s.l.deliver:
		case <-changed:
		case <-s.Context().Done():
			return status.FromContextError(s.Context().Err()).Err()
		}
	}
	cut := s.cut.Load()
	switch r, ok := m.(*pb.WatchResponse); {
	case cut:
		return errLink
	case err != nil:
		s.cancel()
	case ok:
		s.l.mu.Lock()
		s.l.calls[events] += len(r.Events)
		if r.Created && !r.Canceled {
			s.l.calls[opened]++
		}
		s.l.mu.Unlock()
	}
	return err
}

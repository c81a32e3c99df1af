package etcdlock

import (
	"context"
	"fmt"
	"math/rand/v2"
	"reflect"
	"slices"
	"sync"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/connectivity"

	"github.com/fencelab/fencelab/dlock"
)

const (
	minSearch = time.Second      // from the loss of a leader, or a search in vain, to the next search, about; doubles with each
	maxSearch = 30 * time.Second // at most; one that has led for longer is searched for after minSearch again
	tooSlow   = time.Second      // a leader that doesn't answer for so long may be cut off from the others
)

// route is a way to etcd: the client's own, or a connection to one member.
type route struct {
	kv      clientv3.KV
	watcher clientv3.Watcher
	over    context.Context // ends when another way is to be taken
	end     context.CancelFunc

	// Of a connection to a member:
	conn     *grpc.ClientConn // nil: the client's own way
	endpoint string
	term     uint64      // in which it leads
	users    int         // belongs to router.mu, as the next two do
	open     int         // requests without an answer for which somebody waits
	alarm    *time.Timer // not nil if there was such a request after the last answer
}

// router sends transactions, and watches for their messages, by way of the member that leads the cluster: see
// [Options.FollowLeader]. As long as it doesn't know that member, they go where the client sends them.
type router struct {
	b     *Backend
	start sync.Once

	mu      sync.Mutex
	at      *route
	dialled map[string]bool // endpoints to which a connection is still being made
}

func (b *Backend) newRouter() *router {
	return &router{b: b, at: b.ownRoute(), dialled: map[string]bool{}}
}

// ownRoute is the client's way.
func (b *Backend) ownRoute() *route {
	w := &route{kv: b.c, watcher: b.c}
	w.over, w.end = context.WithCancel(b.open)
	return w
}

// checkPlain makes sure that nothing is bypassed by a connection of one's own, such as what package namespace puts before
// all names. It knows those parts of a client that were replaced by others than etcd's own.
func checkPlain(c *clientv3.Client) error {
	for part, types := range map[string][2]reflect.Type{
		"KV":      {reflect.TypeOf(c.KV), reflect.TypeOf(clientv3.NewKVFromKVClient(nil, nil))},
		"Watcher": {reflect.TypeOf(c.Watcher), reflect.TypeOf(clientv3.NewWatchFromWatchClient(nil, nil))},
	} {
		if types[0] != types[1] {
			return fmt.Errorf("%w: etcdlock: FollowLeader would bypass the client's %s, a %v; leave it off, or give the Backend a plain client", dlock.ErrInvalid, part, types[0])
		}
	}
	return nil
}

// begin has the router look for the leader from now on.
func (r *router) begin() {
	r.start.Do(func() {
		if !r.b.begin() {
			return
		}
		go func() {
			defer r.b.busy.Done()
			r.follow()
		}()
	})
}

// take returns the way to go. It stays open until it is given back.
func (r *router) take() *route {
	r.mu.Lock()
	w := r.at
	r.mu.Unlock()
	if w.conn != nil && !slices.Contains(r.b.c.Endpoints(), w.endpoint) { // it may be another cluster now
		r.leave(w)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.at.users++
	return r.at
}

func (r *router) give(w *route) {
	r.mu.Lock()
	w.users--
	r.mu.Unlock()
	r.tidy(w)
}

// tidy closes a connection that is left, and that nobody uses any more.
func (r *router) tidy(w *route) {
	r.mu.Lock()
	idle := w != r.at && w.users == 0 && w.conn != nil
	if idle {
		w.users = -1 // once
	}
	r.mu.Unlock()
	if idle {
		_ = w.watcher.Close()
		_ = w.conn.Close()
	}
}

// turn has everybody go another way than from, if that is the one. What is under way comes to its end where it is, but for
// watches.
func (r *router) turn(from, to *route) {
	r.mu.Lock()
	if r.at == from {
		r.at = to
	} else {
		to.end()
	}
	from.silence()
	r.mu.Unlock()
	from.end()
	r.tidy(from)
}

// leave has everybody go the client's way again, if w is the leader's.
func (r *router) leave(w *route) {
	if w.conn != nil {
		r.turn(w, r.b.ownRoute())
	}
}

// follow keeps to whoever leads, until the Backend is closed.
func (r *router) follow() {
	for rest := minSearch; r.b.open.Err() == nil; rest = min(2*rest, maxSearch) {
		began := time.Now()
		if w := r.find(); w != nil {
			r.mu.Lock()
			own := r.at
			r.mu.Unlock()
			r.turn(own, w)
			for w.conn.GetState() == connectivity.Ready && w.conn.WaitForStateChange(w.over, connectivity.Ready) { //nolint:revive // it waits
			}
			r.leave(w)
			if time.Since(began) > maxSearch {
				rest = minSearch
			}
		}
		pause(r.b.open, rest/2+rand.N(rest/2)) // not all who lost the same leader at once
	}
}

// find returns a way to the leader, or nil.
func (r *router) find() *route {
	endpoints := r.b.c.Endpoints()
	if len(endpoints) < 2 { // the client's way is that to the only member, or through a proxy
		return nil
	}
	for _, endpoint := range endpoints {
		if w := r.routeTo(endpoint); w != nil || r.b.open.Err() != nil {
			return w
		}
	}
	return nil
}

// routeTo returns a way to the member at endpoint if that one leads, or nil.
func (r *router) routeTo(endpoint string) *route {
	b := r.b
	ctx, cancel := context.WithTimeout(b.open, tooSlow)
	defer cancel()
	conn := r.dial(ctx, endpoint)
	if conn == nil {
		return nil
	}
	s, err := pb.NewMaintenanceClient(conn).Status(ctx, &pb.StatusRequest{}, grpc.WaitForReady(true))
	if err != nil || s.Leader != s.Header.MemberId {
		_ = conn.Close()
		return nil
	}
	w := &route{
		kv: clientv3.NewKVFromKVClient(pb.NewKVClient(conn), b.c), watcher: clientv3.NewWatchFromWatchClient(pb.NewWatchClient(conn), b.c),
		conn: conn, endpoint: endpoint, term: s.Header.RaftTerm,
	}
	w.over, w.end = context.WithCancel(b.open)
	return w
}

// dial returns a connection, or nil if there is none when ctx ends. With grpc.WithBlock among its options, the client's Dial
// goes on trying then, until the client is closed if it has no DialTimeout; there is one such attempt for an endpoint at most.
func (r *router) dial(ctx context.Context, endpoint string) *grpc.ClientConn {
	r.mu.Lock()
	under := r.dialled[endpoint]
	r.dialled[endpoint] = true
	r.mu.Unlock()
	if under {
		return nil
	}
	dialled := make(chan *grpc.ClientConn)
	go func() {
		conn, err := r.b.c.Dial(endpoint)
		r.mu.Lock()
		delete(r.dialled, endpoint)
		r.mu.Unlock()
		if err != nil {
			conn = nil
		}
		select {
		case dialled <- conn:
		case <-ctx.Done():
			if conn != nil {
				_ = conn.Close()
			}
		}
	}()
	select {
	case conn := <-dialled:
		return conn
	case <-ctx.Done():
		return nil
	}
}

// commit sends a transaction.
func (r *router) commit(ctx context.Context, cond []clientv3.Cmp, then, otherwise []clientv3.Op) (*clientv3.TxnResponse, error) {
	w := r.take()
	defer r.give(w)
	r.asked(w)
	resp, err := w.kv.Txn(ctx).If(cond...).Then(then...).Else(otherwise...).Commit()
	r.heard(w, err == nil || ctx.Err() == nil)
	if err != nil && passing(err) || err == nil && resp.Header.RaftTerm != w.term {
		r.leave(w)
	}
	return resp, err
}

// asked notes that a request leaves. A leader that is silent is left, although whoever waits for it may give up sooner, or
// never.
func (r *router) asked(w *route) {
	r.mu.Lock()
	defer r.mu.Unlock()
	w.open++
	if w == r.at && w.conn != nil && w.alarm == nil {
		r.arm(w)
	}
}

// heard notes that a request has got an answer, or that nobody waits for it any more.
func (r *router) heard(w *route, answer bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	w.open--
	if w.alarm == nil || !answer {
		return
	}
	w.silence()
	if w.open > 0 {
		r.arm(w)
	}
}

// arm has w left when there is no answer to anybody for a while. r.mu is held.
func (r *router) arm(w *route) { w.alarm = time.AfterFunc(tooSlow, func() { r.leave(w) }) }

// silence stops the alarm. router.mu is held.
func (w *route) silence() {
	if w.alarm != nil {
		w.alarm.Stop()
		w.alarm = nil
	}
}
